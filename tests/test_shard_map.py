"""Several devices, each with seats, pools, tables and a host pool of its own, step together as each would alone.

Attention is data-parallel: only the parameters are common, and those are replicated. Tokens and lengths differ from
device to device, so that one device reading another's rows would show.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from echo_jax import decode
from echo_jax import state as state_lib
from tests import scenarios

WORKERS, SEATS, STEPS, HALF = 4, 3, 44, 30
SETTING = dict(
    records="bf16", keys="fp8", tokens=1, threshold="ema", cap=6, pool="barely", memory="ffi", eviction="lru", warm=0
)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    if jax.device_count() < WORKERS:
        pytest.skip(f"needs {WORKERS} devices, there are {jax.device_count()}")
    return jax.make_mesh((WORKERS,), ("worker",), axis_types=(AxisType.Auto,))


def tokens_of(step: int) -> np.ndarray:
    """i32[WORKERS, B, 1], another one everywhere."""
    return np.random.default_rng(step).integers(0, scenarios.VOCAB, (WORKERS, SEATS, 1)).astype(np.int32)


def at_first(config, worker: int, state):
    """Requests that start together; one seat stays idle, another one in each worker."""
    for seat in range(SEATS):
        if seat != worker % SEATS:
            state = state_lib.admit(config.cache, state, seat, 64)
    return state


def half_way(config, worker: int, state):
    """One worker changes a seat's owner, another forks, the other two go on."""
    if worker == 1:
        state = state_lib.release(config.cache, state, 0)
        state = state_lib.admit(config.cache, state, 0, 64)
    if worker == 2:
        state = state_lib.fork(config.cache, state, 0, 2, 64)
    return state


def configure(memory: str) -> decode.DecodeConfig:
    return scenarios.cache(SETTING | {"memory": memory}, offload=True, model=scenarios.ONE_LAYER)


PARAMS = scenarios.parameters(scenarios.ONE_LAYER)


@functools.cache
def each_alone() -> tuple[list[list[decode.StepOutput]], list[state_lib.EchoState]]:
    """Outputs [step][worker] and last states of the workers, one after another on one device."""
    config = configure("jnp")
    states = [at_first(config, w, state_lib.create(config.cache)) for w in range(WORKERS)]
    outputs = []
    for number in range(STEPS):
        if number == HALF:
            states = [half_way(config, w, state) for w, state in enumerate(states)]
        outputs.append([])
        for w, tokens in enumerate(tokens_of(number)):
            states[w], output = decode.decode_step(PARAMS, states[w], tokens, config=config)
            outputs[-1].append(jax.tree.map(np.asarray, output))
    return outputs, states


def test_the_runs_alone_are_under_pressure():
    """They evict and recall in every worker, and the workers differ; else the comparison below would prove little."""
    outputs, _ = each_alone()
    for w in range(WORKERS):
        assert sum(int(step[w].moved.evicted.sum()) for step in outputs) > 20
        assert sum(int(step[w].moved.recalled.sum()) for step in outputs) > 20
    assert len({outputs[-1][w].digests.tobytes() for w in range(WORKERS)}) == WORKERS


@pytest.mark.parametrize("memory", ["ffi", "jnp"])
def test_every_device_steps_as_if_alone(mesh, memory):
    """Outputs of every step and the whole cache at the end equal those of one device, bit for bit; pools stay where
    they are, those in host memory too, and one program serves the run."""
    config = configure(memory)
    states = [at_first(config, w, state_lib.create(config.cache, d)) for w, d in enumerate(mesh.devices.flat)]
    specs, by_seat = decode.partition_specs(states[0], "worker"), PartitionSpec("worker")

    @functools.partial(jax.jit, donate_argnames="state")
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), specs, by_seat),
        out_specs=(specs, decode.output_specs("worker")),
        check_vma=True,
    )
    def step(params, state, tokens):
        return decode.step(params, state, tokens, config=config)

    places = [pointers(state) for state in states]
    params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
    expected, expected_states = each_alone()
    together = decode.stack_states(states, mesh, "worker")
    for number in range(STEPS):
        if number == HALF:
            states = [half_way(config, w, state) for w, state in enumerate(decode.unstack_states(together))]
            together = decode.stack_states(states, mesh, "worker")
        tokens = jax.device_put(tokens_of(number).reshape(-1, 1), NamedSharding(mesh, by_seat))
        together, outputs = step(params, together, tokens)
        for w in range(WORKERS):
            assert_same_bits(expected[number][w], part(outputs, w), f"step {number}, worker {w}")
    assert getattr(step, "_cache_size")() == 1  # noqa: B009
    states = decode.unstack_states(together)
    assert [pointers(state) for state in states] == places
    for w in range(WORKERS):
        assert_same_bits(expected_states[w], states[w], f"the cache of worker {w}")


def part(outputs: decode.StepOutput, worker: int) -> decode.StepOutput:
    """What one worker put into the global outputs, by the axes that output_specs promises."""
    moved = jax.tree.map(lambda x: np.split(np.asarray(x), WORKERS)[worker], outputs.moved)
    seats = slice(worker * SEATS, (worker + 1) * SEATS)
    lists, digests = outputs.selected[:, seats], outputs.digests[:, seats]
    return decode.StepOutput(outputs.logits[seats], lists, digests, outputs.is_full[seats], moved)


def pointers(state) -> list[int]:
    arrays = [state.host_pool, *(x for layer in state.layers for x in (layer.records, layer.index_keys))]
    return [array.unsafe_buffer_pointer() for array in arrays]


def assert_same_bits(one, other, where: str):
    for (path, a), b in zip(jax.tree.leaves_with_path(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.tobytes() == b.tobytes(), f"{where}: {jax.tree_util.keystr(path)}"


def test_states_that_do_not_fit_the_mesh_are_refused(mesh):
    config = configure("jnp")
    states = [state_lib.create(config.cache, device) for device in mesh.devices.flat]
    with pytest.raises(ValueError, match=r"3 states do not fit axis 'worker' of a mesh of \{'worker': 4\}"):
        decode.stack_states(states[:3], mesh, "worker")
    with pytest.raises(ValueError, match="4 states do not fit axis 'seat'"):
        decode.stack_states(states, mesh, "seat")
    with pytest.raises(ValueError, match="state 0 is on .* but the mesh has .* there; create each state on its own"):
        decode.stack_states(states[::-1], mesh, "worker")
    later = states[2].replace(step=states[2].step + 1)
    with pytest.raises(ValueError, match=r"at steps \[0, 0, 1, 0\] but one clock serves all"):
        decode.stack_states([*states[:2], later, states[3]], mesh, "worker")
