"""Rivals: what each attends and fetches ahead, against loops; and what nobody may do."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.replay import rivals
from echo_jax.replay.run import run_layer
from echo_jax.replay.settings import Setting, plan
from echo_jax.traces import TraceInfo
from tests.oracles import replay as oracle
from tests.oracles.select import top_k
from tests.oracles.threshold import Never
from tests.test_replay_counts import RECORDS, STEPS, K, P, R, history

PAGE, SLOTS = 3, 8


def info(fields=(), kinds=("full",)):
    return TraceInfo(
        len(kinds), R, STEPS, P, K, kinds, ("test",) * len(kinds), "synth", 0, page_size=PAGE, fields=fields
    )


@functools.cache
def guesses():
    """Another layer's scores, a little like this one's; cosines; bounds of pages."""
    source, steps = history()
    random = np.random.default_rng(9)
    guess = np.array([step.score for step in steps]) + random.normal(size=(STEPS, R, P)).astype(np.float32)
    guess[::7] = -np.inf  # no guess, as in a model's first layer
    pages = -(-P // PAGE)
    bound = random.normal(size=(STEPS, R, pages)).astype(np.float32)
    return guess.astype(np.float32), random.uniform(0.6, 1, (STEPS, R)).astype(np.float32), bound


@functools.cache
def with_fields():
    guess, cosine, bound = (jnp.asarray(one) for one in guesses())
    return history()[0].replace(extra={"lookahead_score": guess, "query_cosine": cosine, "page_bound": bound})


FIELDS = ("lookahead_score", "query_cosine", "page_bound")


def settings(header, kind):
    return {name: make(header, SLOTS, kind) for name, make in rivals.RIVALS.items()}


@functools.cache
def replayed(form, kind="full"):
    header = info(FIELDS if form == "recorded" else ())
    source = with_fields() if form == "recorded" else history()[0]
    some = settings(header, kind)
    if kind == "shared":
        some = {name: some[name] for name in ("echo", "no-prefetch", "index-share")}
    elif form == "recorded":  # whose form it makes no difference to is replayed once
        some = {name: some[name] for name in ("freekv", "infinigen", "arkvale", "quest")}
    made = plan(header, kind, list(some.values()), RECORDS)
    counts = run_layer(made, source, STEPS, chunk=STEPS)
    return {name: made.settings.index(setting) for name, setting in some.items()}, counts


# ---- the rules, in loops ---------------------------------------------------------------------------------


class FreeKV:
    """Knows what each request selected last."""

    def __init__(self, steps, cosine):
        self.steps, self.cosine, self.last = steps, cosine, {}
        self.used = {}

    def attended(self, t, r, exact):
        if self.steps[t].starts[r]:
            self.last.pop(r, None)
        last = self.last.get(r)
        self.used[r] = last or []
        self.last[r] = exact
        if last is None:
            return exact
        if self.cosine is None:
            turned = len(set(last) & set(exact)) < np.float32(0.5) * np.float32(len(exact))
        else:
            turned = self.cosine[t][r] < np.float32(0.8)
        return exact if turned else [*last, self.steps[t].length[r]]

    def ahead(self, t, r):
        return [] if self.steps[t].starts[r] else self.last.get(r, [])


def guessed(steps, guess):
    def ahead(t, r):
        if guess is None:
            return top_k(steps[t].score[r], steps[t].length[r] + 1, K)[0]
        return top_k(guess[t][r], steps[t].length[r], K)[0] if np.isfinite(guess[t][r]).any() else []

    def attended(t, r, exact):
        if guess is None or not np.isfinite(guess[t][r]).any():
            return exact
        return [*ahead(t, r), steps[t].length[r]]

    return {"attended": attended, "ahead": ahead}


def paged(steps, bound, page):
    def attended(t, r, exact):
        visible = steps[t].length[r] + 1
        best = []
        for number in range(-(-visible // page)):
            inside = [p for p in range(number * page, (number + 1) * page) if p < visible]
            value = max_of(steps[t].score[r][inside]) if bound is None else float(bound[t][r][number])
            best.append(np.inf if steps[t].length[r] in inside else value)
        chosen, _ = top_k(np.array(best, np.float32), len(best), K // page)
        return [p for number in chosen for p in range(number * page, (number + 1) * page) if p < visible]

    return attended


def max_of(scores):
    """NaN where a score is, as the largest of an array with a NaN is."""
    return float(np.max(scores))


def expected(name, form):
    _, steps = history()
    guess, cosine, bound = guesses() if form == "recorded" else (None, None, None)
    base: dict[str, Any] = {"top_k": K, "capacity": P, "slots_per_request": SLOTS, "threshold": Never}
    base |= {"touch": lambda priority, filled, step, score: step, "allowed": lambda contexts, candidates: [0] * R}
    if name == "freekv":
        rule = FreeKV(steps, cosine)
        more: dict[str, Any] = {"attended": rule.attended, "ahead": rule.ahead}
    elif name == "infinigen":
        more = guessed(steps, guess)
    elif name == "arkvale":
        more = {"attended": paged(steps, bound, PAGE if form == "recorded" else K)}
    elif name == "hisparse":
        more = {"split": True}
    elif name == "index-share":
        more = {"ahead": lambda t, r: top_k(steps[t].score[r], steps[t].length[r] + 1, K)[0]}
    else:
        more = {}
    return oracle.replay(steps, oracle.Ways(**(base | more)))


NEEDY = ("freekv", "infinigen", "arkvale")


@pytest.mark.parametrize(
    "name, form",
    [(name, form) for form in ("recorded", "idealised") for name in NEEDY]
    + [(name, "idealised") for name in ("no-prefetch", "hisparse", "index-share")],
)
def test_a_rival_moves_what_its_rule_says(name, form):
    places, counts = replayed(form)
    place, wanted = places[name], expected(name, form)
    moved = counts.each.moved
    for count in ("hits", "useful", "recalled", "staged", "evicted", "written"):
        assert getattr(moved, count)[:, place].tolist() == [step[count] for step in wanted], count
    assert counts.each.missed[:, place].tolist() == [step["missed"] for step in wanted]


@pytest.mark.parametrize("form", ["recorded", "idealised"])
def test_lossless_systems_miss_nothing_and_lossy_ones_do(form):
    places, counts = replayed(form)
    missed = {name: int(counts.each.missed[:, place].sum()) for name, place in places.items()}
    lossless = {"echo", "no-prefetch", "ess", "sparseserve", "hisparse", "index-share", "no-offload", "infinigen"}
    assert {name for name, count in missed.items() if count == 0} == (lossless if form == "idealised" else set())


def test_without_offload_nothing_moves_and_a_resident_rule_misses_as_its_own():
    for name, form in (("no-offload", "idealised"), ("quest", "recorded")):
        places, counts = replayed(form)
        for count in ("useful", "recalled", "staged", "evicted"):
            assert getattr(counts.each.moved, count)[:, places[name]].sum() == 0, (name, count)
    # With the trace's own bounds Quest and ArkVale choose the same pages.
    assert counts.each.missed[:, places["quest"]].tolist() == counts.each.missed[:, places["arkvale"]].tolist()


def test_in_a_shared_layer_everything_is_known_ahead_and_nobody_predicts():
    places, counts = replayed("idealised", "shared")
    share, plain = places["index-share"], places["no-prefetch"]
    assert counts.each.moved.recalled[:, share].sum() == 0
    assert counts.each.moved.useful[:, share].tolist() == counts.each.moved.recalled[:, plain].tolist()
    echo = places["echo"]
    assert counts.each.moved.staged[:, echo].sum() == 0 and counts.each.predictions.sum() == 0
    assert counts.shared.predictable.sum() == 0 and counts.each.candidates.sum() == 0


def test_ess_begins_warm():
    """Idealised, the first step of a request recalls nothing; with sets of the prompt, what they hold is resident."""
    source, steps = history()
    places, counts = replayed("idealised")
    warm, cold = (counts.each.moved.recalled[:, places[name]] for name in ("ess", "no-prefetch"))
    first = [t for t, step in enumerate(steps) if any(step.starts)]
    alone = [t for t in first if all(not a or s for a, s in zip(steps[t].active, steps[t].starts, strict=True))]
    assert alone and (warm[alone] == 0).all() and (cold[alone] > 0).all()

    prompt = np.full((STEPS, R, 2, K), -1, np.int32)
    half = {}
    for t in first:
        for r in range(R):
            if steps[t].starts[r]:
                exact = top_k(steps[t].score[r], steps[t].length[r] + 1, K)[0]
                half[t, r] = [p for p in exact if p != steps[t].length[r]][:2]
                prompt[t, r, 1, : len(half[t, r])] = half[t, r]
                prompt[t, r, 0, 0] = 0
    given = source.replace(extra={"prompt_selected": jnp.asarray(prompt)})
    made = plan(
        info(("prompt_selected",)), "full", [rivals.RIVALS["ess"](info(("prompt_selected",)), 30, "full")], RECORDS
    )
    counts = run_layer(made, given, 1, chunk=1)
    kept = sum(len(set(half[0, r]) | ({0} if 0 in top_k(steps[0].score[r], steps[0].length[r] + 1, K)[0] and
                                      steps[0].length[r] > 0 else set())) for r in range(R))  # fmt: skip
    assert int(counts.each.moved.hits[0, 0]) == kept > 0


def test_sparseserve_runs_the_working_sets_that_fit():
    """In loops: the rows selected in the last 12 steps, at least K + 1, in order of seats until the pool is full."""
    _, steps = history()
    slots = 2 * (K + 1) + 4
    header = info()
    made = plan(header, "full", [Setting(SLOTS, rule=rivals.SparseServe(slots), threshold=rivals.Never())], RECORDS)
    counts = run_layer(made, history()[0], STEPS, chunk=STEPS)
    used = [dict() for _ in range(R)]
    deferred = []
    for t, step in enumerate(steps):
        total, held, seen = 0, 0, 0
        for r in range(R):
            if step.starts[r]:
                used[r].clear()
            if not step.active[r]:
                continue
            seen += 1
            total += max(K + 1, sum(t - at <= 12 for at in used[r].values()))
            if total > slots and seen > 1:
                held += 1
                continue
            exact = top_k(step.score[r], step.length[r] + 1, K)[0]
            used[r] |= dict.fromkeys(exact, t)
        deferred.append(held)
    assert counts.each.deferred[:, 0].tolist() == deferred and 0 < sum(deferred) < STEPS * R
    active = np.array([sum(step.active) for step in steps])
    assert (counts.each.moved.written[:, 0] == active - np.array(deferred)).all()


def test_every_rival_says_which_form_it_has():
    recorded = settings(info((*FIELDS, "prompt_selected"), ("full", "shared")), "full")
    idealised = settings(info(), "full")
    needy = {"freekv", "infinigen", "arkvale", "quest", "ess", "index-share"}
    assert {name for name, setting in recorded.items() if setting.form == "recorded"} == needy
    assert {name for name, setting in idealised.items() if setting.form == "idealised"} == needy
    for name, setting in idealised.items():
        rule = setting.rule
        text = type(rule).__doc__ or ""
        assert ("Modelled" in text and "Not modelled" in " ".join(text.split())) or name in ("echo", "no-prefetch")
