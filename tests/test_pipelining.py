"""Schedules: rounds and times worked out by hand, the pipeline against a plain loop, and the example as it is run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.replay.cost import CostModel, Exposed
from examples import pipelined_layers, pipelining
from examples.schedules import BANDS, LAYERS, REQUESTS, SCHEDULES, Schedule, run, timeline

DEPTHS = {name: SCHEDULES[name] for name in ("depth 0", "depth 1", "depth 2")}

# ---- values ----------------------------------------------------------------------------------------------


def test_rounds_by_hand():
    assert SCHEDULES["depth 0"].rounds(2) == [
        [("score", 0), ("require", 0), ("attend", 0)],
        [("score", 1), ("require", 1), ("attend", 1)],
    ]
    assert SCHEDULES["depth 2"].rounds(2) == [
        [("score", 0)],
        [("score", 1), ("require", 0)],
        [("require", 1), ("attend", 0)],
        [("attend", 1)],
    ]
    assert SCHEDULES["cross-layer"].rounds(2)[:2] == [
        [("guess", 0), ("prefetch", 0)],
        [("guess", 1), ("score", 0), ("require", 0), ("attend", 0), ("prefetch", 1)],
    ]
    together = Schedule(REQUESTS, (("score", 0), ("prefetch", 1), ("require", 1)))
    assert together.rounds(1)[1] == [("prefetch", 0), ("require", 0)], "a hint that is waited for keeps its place"


@pytest.mark.parametrize(
    ("over", "lags", "complaint"),
    [
        ("seats", (("score", 0),), "over 'seats'"),
        (BANDS, (("scoer", 0),), "scoer"),
        (BANDS, (), "must run over"),
        (REQUESTS, (("score", 0), ("require", 1), ("attend", 0)), "lags .* fall: .*raise the lag"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(over, lags, complaint):
    with pytest.raises(ValueError, match=complaint):
        Schedule(over, lags)


# ---- the pipeline ----------------------------------------------------------------------------------------


def stages_of(schedule: Schedule):
    """Each stage mixes the item, all results before it, and a part that depends on the order of items."""

    def make(place: int, name: str):
        def stage(item, parts, given):
            assert list(given) == schedule.uses(name)
            mine = parts[name] * 3 + item
            result = sum((given[earlier] * (7 + n) for n, earlier in enumerate(given)), item * 11 + place) + mine
            return mine, result

        return stage

    return {name: make(place, name) for place, (name, _) in enumerate(schedule.lags)}


def one_by_one(schedule: Schedule, count: int):
    names, stages = [name for name, _ in schedule.lags], stages_of(schedule)
    parts, results = dict.fromkeys(names, 1), {name: [] for name in names}
    for item in range(count):
        made = {}
        for name in names:
            given = {earlier: made[earlier] for earlier in schedule.uses(name)}
            parts[name], made[name] = stages[name](item, parts, given)
            results[name].append(made[name])
    return parts, results


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_gives_what_a_loop_gives(name):
    """For fewer items than rounds in flight, too. Parts are exact in i32 up to the counts used here."""
    schedule = SCHEDULES[name]
    stages, keep = stages_of(schedule), [stage for stage, _ in schedule.lags]
    start = dict.fromkeys(keep, jnp.int32(1))
    counts = (1, 2, 3, 7)
    all_counts = jax.jit(lambda start: [run(schedule, count, stages, start, keep=keep) for count in counts])
    for count, (parts, kept) in zip(counts, all_counts(start), strict=True):
        wanted_parts, wanted = one_by_one(schedule, count)
        assert {stage: int(part) for stage, part in parts.items()} == wanted_parts
        assert {stage: values.tolist() for stage, values in kept.items()} == wanted


def test_unrolled_there_is_no_loop():
    schedule = SCHEDULES["depth 2"]
    start = dict.fromkeys(("score", "require", "attend"), jnp.int32(1))
    for unroll, loops in ((False, 1), (True, 0)):
        program = jax.jit(lambda start, unroll=unroll: run(schedule, 6, stages_of(schedule), start, unroll=unroll))
        assert program.lower(start).as_text().count("stablehlo.while") == loops
        assert program(start)[1]["attend"].tolist() == one_by_one(schedule, 6)[1]["attend"]


def test_stages_of_a_round_see_the_parts_as_it_began():
    """What a later round may be given early is what must not depend on this round."""

    def score(item, parts, given):
        return (), parts["attend"]

    def attend(item, parts, given):
        return parts["attend"] + 1, given["score"]

    behind = Schedule(LAYERS, (("score", 0), ("attend", 1)))
    _, kept = run(behind, 5, {"score": score, "attend": attend}, {"attend": jnp.int32(0)})
    assert kept["attend"].tolist() == [0, 0, 1, 2, 3]


# ---- times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "us"), [("depth 0", 81), ("depth 1", 55), ("depth 2", 54)])
def test_times_by_hand(name, us):
    """Score 10, move 9, attend 8, three items.

    depth 1   compute: s0 10, s1 20, a0 28, s2 38, a1 46, a2 47-55   link: m0 19, m1 29, m2 38-47
    depth 2   compute: s0 10, s1 20, s2 30, a0 38, a1 46, a2 54      link: m0 19, m1 29, m2 39
    """
    durations = {"score": [10.0] * 3, "require": [9.0] * 3, "attend": [8.0] * 3}
    assert float(timeline(DEPTHS[name], 3, durations)) == us


def test_a_promise_is_served_before_a_hint():
    """Rows of the next layer take long; nothing is missing in this one, so its attention does not wait for them."""
    durations = {"guess": [1.0] * 3, "prefetch": [30.0] * 3, "score": [5.0] * 3}
    durations |= {"require": [0.0] * 3, "attend": [24.0] * 3}
    # Prefetch 0: 1-31. Layer 0: guess 1 at 2, score at 7, waits for 31, attends to 55. Prefetch 1: 31-61. Layer 1:
    # guess 2 at 56, score at 61, attends to 85. Prefetch 2: 61-91. Layer 2: score at 90, waits for 91, attends to 115.
    assert float(timeline(SCHEDULES["cross-layer"], 3, durations)) == 115


ROUND = CostModel("round", "", 5.0, 100.0, 0.5, 10.0, 0.01, 40.0)


def work(**others) -> pipelining.Work:
    rows = {"missing": [0.0, 4.0, 40.0, 300.0], "staged": [0.0, 6.0, 50.0, 400.0], "recalled": [0.0, 1.0, 0.0, 20.0]}
    arrays = {name: np.array(values) for name, values in rows.items()}
    by = arrays["staged"], arrays["recalled"]
    return pipelining.Work(4, 150, np.full((4,), 8000.0), arrays["missing"], {"round": by}, by)._replace(**others)


def test_costs_are_those_of_the_replay_where_they_mean_the_same():
    """Depth 0 of the whole batch is its time without overlap; many bands come near its time with overlap, and never
    below: rows of a band move after it."""
    steps = work()
    staged, recalled = steps.by_threshold["round"]
    exposed = Exposed(ROUND, 150, steps.positions, steps.missing - recalled, recalled, staged)
    fixed = exposed.indexer_us + ROUND.layer_us
    serial = pipelining.layer_us(SCHEDULES["depth 0"], ROUND, steps, 1)
    np.testing.assert_allclose(serial, fixed + exposed.without_overlap_us)
    previous = None
    for bands in (1, 4, 64):
        banded = pipelining.layer_us(SCHEDULES["band"], ROUND, steps, bands) - fixed - exposed.with_overlap_us
        assert (banded >= -1e-9).all()
        assert previous is None or (banded <= previous + 1e-9).all()
        previous = banded
    assert previous is not None and previous.max() < 15  # launch, one band, and one band's rows


def test_a_guess_costs_a_second_scoring():
    steps = work(by_guess=(np.zeros(4), np.zeros(4)))
    each = float(ROUND.indexer_us(8000)) * 2 + ROUND.layer_us
    many = pipelining.layer_us(SCHEDULES["cross-layer"], ROUND, steps, 1000)
    np.testing.assert_allclose(many, each, rtol=1e-3)


def test_small_groups_pay_their_launches():
    rows = pipelining.costs(work(missing=np.zeros(4)), [ROUND])
    assert [row["items"] for row in rows if row["schedule"] in DEPTHS] == [1, 1, 1]
    rows = pipelining.costs(work(missing=np.full(4, 60.0)), [ROUND])
    best = {row["schedule"]: row for row in rows}
    assert best["depth 2"]["items"] > 1 and best["depth 2"]["speedup"] > best["depth 0"]["speedup"] == 1.0
    assert best["depth 0"]["exposed_us"] == pytest.approx(float(ROUND.copy_us(60, 150)))


# ---- the example -----------------------------------------------------------------------------------------


def test_every_schedule_gives_the_bits_of_depth_0(capsys):
    """And does what it is for: under a pool too small for two sets, hints bring rows that are then used."""
    assert pipelining.compare(5) == 0
    printed = capsys.readouterr().out
    found = re.findall(
        r"^(.{12}) 0 of ([\d,]+) words differ.*; ([\d,]+) hits, ([\d,]+) recalled, ([\d,]+) of ([\d,]+) staged",
        printed,
        re.M,
    )
    counts = {name.strip(): [int(number.replace(",", "")) for number in numbers] for name, *numbers in found}
    assert list(counts) == list(SCHEDULES)
    sizes = pipelined_layers.Sizes()
    words = 5 * sizes.layers * sizes.requests * (sizes.hidden + sizes.top_k + 1)
    selected = 5 * sizes.layers * sizes.requests * sizes.top_k
    for name, (compared, hits, recalled, used, staged) in counts.items():
        assert compared == words and hits + recalled + used == selected and 0 < recalled < selected - hits + 1
        assert (used > 50 and staged > used) if name in ("cross-layer", "band") else staged == 0


@pytest.mark.parametrize("wrong", [0, 3])
def test_the_program_costs_what_a_trace_misses(wrong, monkeypatch, capsys):
    """The comparison above decides the exit status; what it found is not found again here."""
    monkeypatch.setattr(pipelining, "compare", lambda steps: wrong)
    trace = "synth:median,requests=4,steps=8,context=512,top_k=32"
    assert pipelining.main(["--trace", trace, "--cost", "h200"]) == min(wrong, 1)
    printed = capsys.readouterr().out
    rows = re.findall(r"^h200 +(.+?) +(\d+) +([\d.]+) +([\d.]+) +(-?[\d.]+) +([\d.]+)x$", printed, re.MULTILINE)
    assert [row[0] for row in rows] == list(SCHEDULES) and rows[0][-1] == "1.00"
    missing = re.search(r": (\d+) rows missing a layer-step of 4 requests", printed)
    assert missing and 0 < int(missing[1]) < 4 * 32


def test_a_difference_is_seen(monkeypatch, capsys):
    """One bit of one attended value, and one position, of another schedule."""
    really = pipelined_layers.decode

    def spoilt(sizes, schedule, steps, unroll=False):
        outputs, seconds = really(sizes, schedule, steps, unroll)
        if schedule is SCHEDULES["depth 1"]:
            outputs.attended.view(np.uint32)[1, 2, 3, 4] ^= 1
            outputs.positions[0, 1, 2, 3] += 1
        return outputs, seconds

    monkeypatch.setattr(pipelined_layers, "decode", spoilt)
    monkeypatch.setattr(pipelining, "SCHEDULES", DEPTHS)
    assert pipelining.compare(2) == 2
    assert "depth 1      2 of" in capsys.readouterr().out


def test_wrong_input_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        pipelining.main(["--steps", "1"])
    assert "--steps is 1 but must be at least 2" in capsys.readouterr().err
