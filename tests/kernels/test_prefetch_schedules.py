"""The bench of schedules where there is no GPU: every line gives the same bits, and rows say what was measured."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import indexer_scores as plain
from bench import prefetch_calls, prefetch_programs, prefetch_schedules
from bench import prefetch_stages as stages
from bench.harness import Measurement
from bench.prefetch_calls import HEADS, WIDTH, Inputs, Set
from bench.prefetch_stages import FUSED, Line
from echo_jax import hostmem, indexer
from examples.schedules import SCHEDULES
from pallas_kernels import indexer_scores
from pallas_kernels.indexer_prefetch import reference

K, MISSES = 32, 6
SIZES = stages.Sizes(seats=4, length=256, heads=2, groups=(2,), bands=2, layers=2, staging=32, cap=2)


@pytest.fixture(scope="module")
def calls():
    """What `prefetch_calls.inputs` makes on a GPU, by the reference, and of smaller sets."""
    _, weights, pages, numbers, visible = plain.arguments("fp8", SIZES.seats, SIZES.length)

    @jax.jit
    def made(query):
        score = indexer_scores(query, weights, pages, numbers, visible)[:, 0]
        found, rows = indexer.select(score, visible[:, 0] - 1, K), reference.host_rows(numbers)
        threshold = jnp.nextafter(found.kth_score, jnp.float32(-jnp.inf))
        return threshold, rows, jnp.take_along_axis(rows, found.positions, axis=1)

    sets, random = [], np.random.default_rng(0)
    for _ in range(2):
        drawn = random.standard_normal((SIZES.seats, 1, HEADS, WIDTH), np.float32)
        query = jnp.asarray(drawn, jnp.float8_e4m3fn)
        threshold, rows, top = made(query)
        sets.append(Set(query, threshold, threshold, random.permuted(np.asarray(top), axis=1)))
    given = Inputs(SIZES.seats, SIZES.length, weights, pages, numbers, visible, rows, tuple(sets))
    shape = (2, SIZES.host_rows, *stages.RECORDS.shape)
    pool = hostmem.create_pool(shape, stages.RECORDS.dtype, hostmem.HostMemory.ORDINARY)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prefetch_calls, "K", K)
        patched.setattr(prefetch_calls, "SLOTS", 3 * K)
        yield prefetch_schedules.Calls(SIZES, given, prefetch_schedules.filled_host_pool(pool), MISSES)


@functools.cache
def program(line):
    jitted = jax.jit(prefetch_programs.program(SIZES, line))
    return lambda *arguments: jitted(*arguments)[0]


def test_every_line_gives_the_bits_of_the_first(calls, capsys):
    """From pools in which 6 of 32 rows of each request are missing; and what is staged is what a line is for."""
    found = prefetch_schedules.differences(calls, lambda line, is_marked: program(line))
    assert {line.name for line in found} == {*SCHEDULES, FUSED} - {"depth 0"} and not any(found.values())
    printed = capsys.readouterr().out
    moved = re.findall(
        r"^ +(.*?)[, ] .* ([\d,]+) hits, (\d+) rows from staging, (\d+) recalled$", printed, re.MULTILINE
    )
    assert len(moved) == len(found)
    for name, _, staged, recalled in moved:
        wanted = {"band": (24, 0), FUSED: (8, 16)}.get(name.partition(" ")[0], (0, 24))
        if name != "cross-layer":
            assert (int(staged), int(recalled)) == wanted, name
        else:
            assert int(staged) > 24 and int(staged) + int(recalled) == 48


def test_a_word_that_differs_is_counted(calls, monkeypatch):
    """One attended value of one line, and one position of another."""

    def spoilt(line, is_marked):
        def call(*arguments):
            state, output = program(line)(*arguments)
            if line.name == "depth 1":
                output = output._replace(attended=output.attended.at[1, 0, 0, 1, 5].add(1.0))
            if line.name == "band":
                output = output._replace(positions=output.positions.at[0, 3, 0, 7].add(1))
            return state, output

        return call

    found = prefetch_schedules.differences(calls, spoilt)
    assert {line.name for line, count in found.items() if count} == {"depth 1", "band"}
    assert sum(found.values()) == 2


def test_the_model_is_that_of_the_schedules():
    """Two groups of 10 + 20 + 5 us: in turn 70, one ahead 10 + 20 + 20 + 5; the bands' rest follows; layers share."""
    alone = {"score": 10.0, "require": 20.0, "attend": 5.0}
    assert prefetch_schedules.model_us(Line("depth 0", 2), alone) == 70
    assert prefetch_schedules.model_us(Line("depth 1", 2), alone) == 55
    assert prefetch_schedules.model_us(Line("band", 3), {"score": 10.0, "prefetch": 4.0, "finish": 30.0}) == 64
    alone = {"guess": 3.0, "prefetch": 20.0, "score": 4.0, "require": 1.0, "attend": 6.0}
    serial = prefetch_schedules.model_us(Line("cross-layer", 1), alone)
    assert serial == 3 + 20 + 1 + 6 and prefetch_schedules.model_us(Line("cross-layer", 4), alone) < serial


def test_rows_hold_the_model_beside_the_measured(calls, tmp_path, monkeypatch, capsys):
    class Told(prefetch_schedules.Clocked):
        def line(self, line):
            return Measurement(80.0 if line.name == "depth 0" else 40.0, 39.0, 81.0, 3)

        def stages(self, line):
            return {name: Measurement(10.0, 9.0, 11.0, 3) for name in prefetch_programs.names_of(line)}

    monkeypatch.setenv("ECHO_RESULTS", str(tmp_path))
    told = Told(calls, lambda line, is_marked: None, repeats=3)
    prefetch_schedules.measure(told, {Line("band", 2): 3})
    rows = [json.loads(line) for line in (tmp_path / prefetch_schedules.FILE).read_text().splitlines()]
    by_name = {row["name"].partition(", 4 x 256")[0].removeprefix("schedule "): row for row in rows}
    assert len(rows) == len(by_name) == len(stages.lines_of(SIZES))
    row = by_name["depth 2, 2 groups of requests"]
    assert row["value"] == 40 and row["shapes"]["model_us"] == 40 and row["shapes"]["score_us"] == 10
    assert "2.000 times as fast" in row["notes"] and "+0.0%" in row["notes"]
    assert "model_us" not in by_name[FUSED]["shapes"] and by_name["band, 2 bands"]["shapes"]["finish_us"] == 10
    assert [name for name, row in by_name.items() if "3 WORDS DIFFER" in row["notes"]] == ["band, 2 bands"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
