"""locate against loops: the place of every entry, and the record in every place that is named, by jnp and library."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import _ffi
from echo_jax.locate import locate
from echo_jax.types import Staging, Tables
from tests import locate_cases
from tests.locate_cases import CASES, Case
from tests.oracles import locate as oracle


@functools.partial(jax.jit, static_argnames=("device_slots", "implementation"))
def run(pool, made, *, device_slots: int, implementation: str):
    seats = made["lengths"].shape[0]
    tables = Tables(
        page_table=made["page_table"],
        page_count=made["page_count"],
        page_cached=jnp.zeros(made["page_count"].shape, bool),
        lengths=made["lengths"],
        active=jnp.ones((seats,), bool),
    )
    staging = Staging(made["staged_rows"], made["staged"], jnp.zeros((seats,), jnp.int32))
    lists = made["positions"], made["new_records"], staging
    sizes = {"device_slots": device_slots, "implementation": implementation}
    return locate(made["slot_of"], made["layer"], tables, *lists, pool, **sizes)


def ask(made: dict, device_slots: int, implementation: str, platform: str | None = None):
    """(places, fetched) by one implementation. The library's pool is pinned, jnp's an ordinary array."""
    device = jax.devices(platform)[0]
    if implementation == "jnp":
        pool = jax.device_put(made["host_pool"], device)
    else:
        kind = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        pool = jax.device_put(made["host_pool"], kind)
    operands = {name: jax.device_put(value, device) for name, value in made.items() if name != "host_pool"}
    located = run(pool, operands, device_slots=device_slots, implementation=implementation)
    return np.asarray(located.places), np.asarray(located.fetched)


def hold(made: dict, device_slots: int, places: np.ndarray, fetched: np.ndarray, name: str = "") -> None:
    operands = dict(made)
    wanted, held = oracle.locate(
        operands["slot_of"],
        int(operands["layer"]),
        operands["page_table"],
        operands["lengths"],
        operands["positions"],
        operands["new_records"],
        operands["staged_rows"],
        operands["staged"],
        operands["host_pool"],
        device_slots,
    )
    np.testing.assert_array_equal(places, wanted, err_msg=name)
    for place, record in held.items():
        np.testing.assert_array_equal(fetched[place - device_slots], record, err_msg=f"{name} place {place}")


IMPLEMENTATIONS = ["jnp", "ffi"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "many_lists"])
def test_every_entry_has_the_place_of_its_record(name, implementation):
    if implementation == "ffi" and (reason := _ffi.why_unavailable()):
        pytest.skip(reason)
    case = CASES[name]
    for seed in range(3):
        made = locate_cases.make(case, seed)
        places, fetched = ask(made, case.device_slots, implementation)
        hold(made, case.device_slots, places, fetched, f"{name} seed {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_answers_as_the_loops(name):
    case = CASES[name]
    for seed in range(3):
        made = locate_cases.make(case, seed)
        hold(made, case.device_slots, *ask(made, case.device_slots, "cuda", "gpu"), f"{name} seed {seed}")


def test_the_cases_are_what_their_names_say():
    """A case whose draw misses its point would prove nothing."""

    def told(name: str) -> tuple[np.ndarray, dict, Case]:
        case = CASES[name]
        made = locate_cases.make(case)
        places = np.asarray(ask(made, case.device_slots, "jnp")[0])
        return places, made, case

    places, _, case = told("nothing_missing")
    assert (places < case.device_slots + case.seats * case.tokens).all() and (places >= 0).any()
    places, _, case = told("all_missing")
    assert (places[places >= 0] >= case.device_slots).all()
    places, made, case = told("sixteen_forks")
    fetched = places[places >= case.device_slots + case.seats]
    assert len(set(fetched.tolist())) < 0.8 * len(fetched), "forks select rows of shared pages together"
    places, made, case = told("several_tokens")
    fetched = places[places >= case.device_slots + case.seats * case.tokens]
    assert len(set(fetched.tolist())) < len(fetched), "several queries of a seat select one missing row"
    for name in ("plain", "all_staged", "staging_beyond_a_warp"):
        _, made, case = told(name)
        assert (made["staged_rows"] >= 0).sum() > 6


@pytest.mark.parametrize("layer", [-1, 3, 2**31 - 1, -(2**31)])
def test_a_layer_outside_the_pool_has_no_slots_and_reads_zeros(layer):
    """On a CPU the library refuses such a number; jnp and a GPU cannot."""
    case = Case(staging=0)
    made = locate_cases.make(case) | {"layer": np.int32(layer)}
    hold(made, case.device_slots, *ask(made, case.device_slots, "jnp"))


def test_numbers_outside_have_no_place():
    """A page that no pool has, a position beyond the table or beyond the new tokens: NO_PLACE, and nothing is read."""
    case = Case(seats=2, listed=6)
    made = locate_cases.make(case)
    made["page_table"][0, 0] = 10**6
    made["lengths"][:] = (100, 128)
    made["positions"][0, 0] = (3, 63, 64, 100, 101, 5000)
    made["positions"][1, 0] = (0, 127, 128, 129, 10**9, -1)
    places, fetched = ask(made, case.device_slots, "jnp")
    hold(made, case.device_slots, places, fetched)
    assert (places[0, 0][[0, 1, 4, 5]] == -1).all() and (places[1, 0][3:] == -1).all()


def test_nothing_is_written_but_the_answer():
    case = CASES["several_tokens_shared"]
    made = locate_cases.make(case)
    before = {name: np.array(value) for name, value in made.items()}
    ask(made, case.device_slots, "jnp")
    for name, value in before.items():
        np.testing.assert_array_equal(made[name], value, err_msg=name)


def test_shapes_that_do_not_fit_are_refused_with_both():
    case = Case()
    made = locate_cases.make(case)
    with pytest.raises(ValueError, match=r"lengths has shape \[1\] but positions \[2, 1, 24\].*need \[2\]"):
        ask(made | {"lengths": made["lengths"][:1]}, case.device_slots, "jnp")
    with pytest.raises(ValueError, match="positions is int32"):
        ask(made | {"positions": made["positions"][0]}, case.device_slots, "jnp")
    with pytest.raises(ValueError, match="device_slots is -1"):
        ask(made, -1, "jnp")
    with pytest.raises(ValueError, match="staging.records is float32"):
        ask(made | {"staged": made["staged"].astype(np.float32)}, case.device_slots, "jnp")
