"""A cache that was saved and restored goes on as the one that was not; what does not fit is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from echo_jax import decode, eviction, threshold
from echo_jax import state as state_lib
from echo_jax.fingerprint import model_fingerprint
from echo_jax.state_files import restore_state, save_state
from tests import scenarios

SETTING = dict(
    records="bf16", keys="fp8", tokens=1, threshold="ema", cap=6, pool="barely", memory="ffi", eviction="lru", warm=0
)
MODEL = scenarios.ONE_LAYER
PARAMS = scenarios.parameters(MODEL)


def configure(memory: str) -> decode.DecodeConfig:
    return scenarios.cache(SETTING | {"memory": memory}, offload=True, model=scenarios.ONE_LAYER)


def steps(state, config, numbers):
    """The state after those steps, and everything they returned."""
    outputs = []
    for number in numbers:
        tokens = np.random.default_rng(number).integers(0, scenarios.VOCAB, (3, 1)).astype(np.int32)
        state, output = decode.decode_step(PARAMS, state, tokens, config=config)
        outputs += [np.asarray(leaf) for leaf in jax.tree.leaves(output)]
    return state, outputs


def lived_in(config) -> state_lib.EchoState:
    """Evictions, a shared page, a cached page, an idle seat and one that is half way through a page."""
    cache = config.cache
    state = state_lib.create(cache)
    for seat in (0, 1):
        state = state_lib.admit(cache, state, seat, 128)
    state, _ = steps(state, config, range(66))
    state = state_lib.fork(cache, state, 0, 2, 192)
    state = state_lib.release(cache, state, 1, keep_pages=True)
    state, _ = steps(state, config, range(66, 70))
    tables = jax.tree.map(np.asarray, state.tables)
    assert tables.page_cached.any() and tables.page_count.max() == 2 and list(tables.active) == [True, False, True]
    assert int(tables.lengths[0]) % 64 and state.layers[0].slots is not None and not state.layers[0].slots.free.any()
    return state


def assert_same_bits(one, other):
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize(("before", "after"), [("ffi", "jnp"), ("jnp", "ffi")])
def test_a_restored_cache_goes_on_bit_for_bit(tmp_path, before, after):
    """Regression of a kind seen in public: a saved cache lacked its index keys, or their scales, and the restored
    requests diverged. Here every leaf comes back, also from one kind of host memory into the other."""
    config, other = configure(before), configure(after)
    state = lived_in(config)
    save_state(tmp_path / "cache", state, config.cache)
    restored = restore_state(tmp_path / "cache", other.cache)
    assert_same_bits(state, restored)
    fresh = state_lib.create(other.cache)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True):
        assert a.sharding == b.sharding and a.committed and jax.typeof(a) == jax.typeof(b)
    state, expected = steps(state, config, range(70, 76))
    steps(fresh, other, [0])
    compiled = getattr(decode.decode_step, "_cache_size")()  # noqa: B009
    restored, outputs = steps(restored, other, range(70, 76))
    assert_same_bits(expected, outputs)
    assert_same_bits(state, restored)
    assert getattr(decode.decode_step, "_cache_size")() == compiled  # noqa: B009


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    config = configure("jnp")
    path = tmp_path_factory.mktemp("saved") / "cache"
    save_state(path, state_lib.create(config.cache), config.cache)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_slots": 34}, "device_slots = 33 but the config has 34"),
        ({"capacity": 128}, "capacity = 192 but the config has 128"),
        ({"offload": False}, "offload = True but the config has False"),
        ({"top_k": 9}, "top_k = 10 but the config has 9"),
        ({"eviction": eviction.Lfu()}, r"eviction = Lru\(\) but the config has Lfu\(\)"),
        (
            {"eviction": eviction.ScoreWeighted(3)},
            r"eviction = Lru\(\) but the config has ScoreWeighted",
        ),
        ({"threshold": threshold.Ema(0.25)}, r"threshold = Ema\(alpha=0.5\) but the config has Ema\(alpha=0.25\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_cache_is_refused_with_both_values(saved, change, message):
    with pytest.raises(ValueError, match=f"was saved with {message}.*; restore it with the saved value"):
        restore_state(saved, dataclasses.replace(configure("jnp").cache, **change))


def test_how_rows_move_may_be_chosen_anew(saved):
    cache = dataclasses.replace(configure("jnp").cache, staging=3, prefetch_per_position=0.5, chunk=128, warm_windows=1)
    assert_same_bits(restore_state(saved, cache), state_lib.create(cache))


def test_a_resident_state_and_another_device(tmp_path):
    """Without offload there are no maps and no host pool."""
    config = scenarios.cache(SETTING, offload=False, model=scenarios.ONE_LAYER)
    state = state_lib.create(config.cache)
    state = state.replace(
        layers=tuple(layer.replace(records=layer.records + layer.records.dtype.type(3)) for layer in state.layers)
    )
    save_state(tmp_path / "cache", state, config.cache)
    restored = restore_state(tmp_path / "cache", config.cache, jax.devices()[-1])
    assert_same_bits(state, restored)
    assert {leaf.device for leaf in jax.tree.leaves(restored)} == {jax.devices()[-1]}


def test_what_is_no_saved_cache_is_refused(tmp_path, saved):
    cache = configure("jnp").cache
    with pytest.raises(FileNotFoundError, match="give a folder written by save_state"):
        restore_state(tmp_path / "nowhere", cache)
    with pytest.raises(ValueError, match="has no state and config parts"):
        restore_state(tmp_path, cache)
    state = state_lib.create(cache)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save_state(saved, state, cache)
    state = state.replace(tables=state.tables.replace(lengths=state.tables.lengths[:2]))
    save_state(tmp_path / "short", state, cache)
    with pytest.raises(ValueError, match=r"tables.lengths in .* is int32\[2\] but .* has int32\[3\]"):
        restore_state(tmp_path / "short", cache)


@dataclasses.dataclass(frozen=True)
class Lru:
    """A user's policy of the same name as one of the library, which never evicts by age."""

    def touch(self, priority, was_free, step, score):
        return 0 * step

    def rebase(self, priority, shift):
        return priority


def test_a_policy_of_the_same_name_is_another_policy(saved):
    """Regression: only the repr was compared, so a class of the same name took over priorities that it never wrote."""
    cache = dataclasses.replace(configure("jnp").cache, eviction=Lru())
    with pytest.raises(ValueError, match=r"eviction = Lru\(\) but the config has .*test_state_files.Lru\(\)"):
        restore_state(saved, cache)


def test_a_cache_is_restored_for_the_model_that_filled_it(tmp_path, saved):
    """The fingerprint decides; without one on either side nothing is known, and nothing is asked."""
    cache = configure("jnp").cache
    kinds = ("plain", "tied")
    mine, other = (model_fingerprint(scenarios.parameters(MODEL, kind), MODEL) for kind in kinds)
    save_state(tmp_path / "mine", state_lib.create(cache), cache, model=mine)
    assert_same_bits(restore_state(tmp_path / "mine", cache, model=mine), state_lib.create(cache))
    with pytest.raises(ValueError, match=f"was filled by model {mine} but model is {other}; restore it with"):
        restore_state(tmp_path / "mine", cache, model=other)
    with pytest.raises(ValueError, match=f"was filled by model {mine} but no model was given"):
        restore_state(tmp_path / "mine", cache)
    with pytest.raises(ValueError, match=f"was saved without a model but model is {mine}"):
        restore_state(saved, cache, model=mine)
    for path, model in ((tmp_path / "mine", other), (tmp_path / "mine", None), (saved, mine)):
        assert_same_bits(restore_state(path, cache, model=model, allow_other_model=True), state_lib.create(cache))
