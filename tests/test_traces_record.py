"""Recording: the run is `generate`'s, the scores are those it selected from, the rivals' fields mean what they say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import state as state_lib
from echo_jax.decode import DecodeConfig, cache_config
from echo_jax.engine import Generation, generate, resident
from echo_jax.layer import LayerInputs
from echo_jax.models import dsa
from echo_jax.models.config import DENSE, FULL, SHARED
from echo_jax.prefill import prefill
from echo_jax.sampling import Sampling
from echo_jax.traces import OPTIONAL_FIELDS, open_trace
from echo_jax.traces.record import Watch, page_bounds, query_cosines, record, score_positions, trace_info
from echo_jax.traces.writing import Writer
from tests import scenarios
from tests.oracles.select import top_k

KINDS = (FULL, SHARED, FULL)
MODEL = dataclasses.replace(scenarios.ONE_LAYER, layer_kinds=KINDS, mlp_kinds=(DENSE,) * 3, num_experts=0)
SCORING = (0, 2)
K, NEW, WINDOWS = 10, 14, 6
SAMPLING = Sampling(temperature=1.0)
PROMPTS = [list(range(1, 38)), [5, 9, 2] * 25, [7, 7, 3]]
"""One above K, one that spans two chunks, one that is still below K when it starts."""


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: dsa.init_params(jax.random.key(3), MODEL, scale=0.3))()


CONFIG = DecodeConfig(MODEL, cache_config(MODEL, seats=len(PROMPTS), capacity=128, chunk=64))
WATCH = Watch(OPTIONAL_FIELDS, page_size=16, windows=WINDOWS)
HEADER = {"requests": len(PROMPTS), "steps": NEW - 1, "band": None, "score_dtype": "float32", "seed": 2, "recipe": {}}


@pytest.fixture(scope="module")
def generated(params) -> Generation:
    """The resident run, which every offloaded one equals: tests/test_lossless.py."""
    return generate(params, resident(CONFIG), PROMPTS, NEW, sampling=SAMPLING, seed=2, keep_record=True)


def recorded(path, params, **options):
    with Writer(path, trace_info(CONFIG, WATCH, **HEADER)) as writer:
        tokens = record(params, CONFIG, PROMPTS, NEW, writer, WATCH, sampling=SAMPLING, seed=2, **options)
    return tokens, open_trace(path)


@pytest.fixture(scope="module")
def run(params, tmp_path_factory):
    """Tokens and trace, with every field."""
    return recorded(tmp_path_factory.mktemp("record") / "trace", params)


def steps(trace, layer):
    source = trace.layer(layer)
    step = jax.jit(lambda t: source.step(source.init(), t)[1])
    return [jax.tree.map(np.asarray, step(jnp.int32(t))) for t in range(trace.info.steps)]


def test_tokens_and_sets_are_those_of_generate(run, generated):
    tokens, trace = run
    assert tokens == generated.tokens and generated.record is not None
    assert trace.info.steps == NEW - 1 and trace.info.layer_kinds == MODEL.layer_kinds
    for layer in range(MODEL.num_layers):
        for t, step in enumerate(steps(trace, layer)):
            np.testing.assert_array_equal(step.selected, generated.record.lists[t][layer, :, 0])


def test_scores_are_what_was_selected_from(run):
    _, trace = run
    for layer in SCORING:
        for t, step in enumerate(steps(trace, layer)):
            np.testing.assert_array_equal(step.length, [len(prompt) + t for prompt in PROMPTS])
            assert step.active.all() and (step.starts == (t == 0)).all()
            for row, length in enumerate(step.length):
                positions, kth = top_k(step.score[row], int(length) + 1, K)
                assert [s for s in step.selected[row] if s >= 0] == positions
                assert step.kth_score[row] == np.float32(kth)
                assert np.isfinite(step.score[row, : length + 1]).all()
    assert not np.array_equal(steps(trace, 0)[3].score, steps(trace, 2)[3].score)


def test_a_bound_holds_for_every_position_of_its_page(run):
    _, trace = run
    for step in steps(trace, 2):
        highest = step.score.reshape(len(PROMPTS), -1, 16).max(axis=2)
        assert step.page_bound.shape == highest.shape
        np.testing.assert_array_equal(np.isfinite(step.page_bound), np.isfinite(highest))
        seen = np.isfinite(highest)
        assert (step.page_bound[seen] >= highest[seen] - 1e-5).all()


def test_a_bound_is_reached_by_pages_of_one_position():
    """Their smallest and largest key are one key, whatever the signs of query, key and weight; and a page of 8 is
    bounded by no less than its best."""
    random = np.random.default_rng(1)
    query, weights, keys = (
        random.standard_normal(shape).astype(np.float32) for shape in ((3, 4, 16), (3, 4), (512, 16))
    )
    state = state_lib.create(CONFIG.cache)
    for seat in range(3):
        state = state_lib.admit(CONFIG.cache, state, seat, 128)
    view = state_lib.begin_step(CONFIG.cache, state, 1)._replace(visible=jnp.asarray([[70], [0], [128]]))
    layer = state.layers[0].replace(index_keys=jnp.asarray(keys[: 3 * 128].reshape(-1, 64, 16)))
    inputs = LayerInputs(view, view, jnp.asarray(query[:, None]), jnp.asarray(weights[:, None]))  # type: ignore[arg-type]
    score = jax.jit(lambda: score_positions(CONFIG.cache, layer, view, inputs)[:, 0])()
    bounds, wide = jax.jit(lambda: [page_bounds(layer, inputs, view, CONFIG, page) for page in (1, 8)])()
    np.testing.assert_allclose(bounds, score, rtol=1e-4, atol=1e-4)
    assert np.isfinite(bounds).sum(axis=1).tolist() == [70, 0, 128]
    assert (wide >= score.reshape(3, -1, 8).max(axis=2) - 1e-4).all() and (wide[2] > score[2].max()).any()


def test_a_guess_is_made_from_what_entered_the_layer_before(params, run, tmp_path):
    """It is right where the layer before changes nothing, and not where it does; nobody guesses for layer 0."""
    silent = dict(params["layers"][1])
    for part, name in (("attention", "o"), ("mlp", "down")):
        silent[part] = silent[part] | {name: jnp.zeros_like(silent[part][name])}
    layers = (params["layers"][0], silent, params["layers"][2])
    _, trace = recorded(tmp_path / "trace", params | {"layers": layers})
    for t, step in enumerate(steps(trace, 2)):
        older = np.arange(trace.info.capacity) < step.length[:, None]
        np.testing.assert_allclose(step.lookahead_score[older], step.score[older], rtol=1e-4, atol=1e-5)
        assert (step.lookahead_score[~older] == -np.inf).all()
        other = steps(run[1], 2)[t]
        assert np.isfinite(other.lookahead_score[older]).all()
        assert np.abs(other.lookahead_score[older] - other.score[older]).max() > 0.1
    assert (steps(trace, 0)[0].lookahead_score == -np.inf).all()


def test_cosines_are_of_this_step_and_the_last(run):
    _, trace = run
    cosines = np.stack([step.query_cosine for step in steps(trace, 0)])
    assert (cosines[0] == -1).all() and (np.abs(cosines[1:]) <= 1 + 1e-6).all() and np.std(cosines[1:]) > 0.01
    random = np.random.default_rng(0)
    one, other = random.standard_normal((2, 3, 4, 8)).astype(np.float32)
    other[1], other[2] = 2 * one[1], 0
    wanted = [np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(one[0], other[0], strict=True)])]
    np.testing.assert_allclose(query_cosines(jnp.asarray(one), jnp.asarray(other)), [*wanted, 1, -1], atol=1e-5)


def test_prompt_sets_are_those_of_the_last_queries(run, params):
    _, trace = run
    for layer in range(MODEL.num_layers):
        step = steps(trace, layer)[0]
        assert step.prompt_selected.shape == (len(PROMPTS), WINDOWS, K)
    config = resident(CONFIG)
    for row, prompt in enumerate(PROMPTS):
        state = state_lib.admit(config.cache, state_lib.create(config.cache), row, 128)
        rows = []

        def keep(done, output, rows=rows):
            rows.extend(np.asarray(output.selected)[2, : (done - 1) % config.cache.chunk + 1])

        prefill(params, state, prompt, row, config=config, progress=keep)
        wanted = np.full((WINDOWS, K), -1, np.int32)
        wanted[-min(len(prompt), WINDOWS) :] = rows[-WINDOWS:]
        np.testing.assert_array_equal(steps(trace, 2)[0].prompt_selected[row], wanted)


def test_a_request_that_stops_leaves_its_row_idle(tmp_path, params, generated):
    stop = generated.tokens[1][4]
    tokens, trace = recorded(tmp_path / "trace", params, stop_tokens=(stop,))
    wanted = [one[: one.index(stop) + 1] if stop in one else one for one in generated.tokens]
    assert tokens == wanted and len(tokens[1]) <= 5
    ran = np.stack([step.active for step in steps(trace, 0)]).sum(axis=0)
    assert ran.tolist() == [len(one) - 1 for one in tokens]
    assert trace.info.steps == max(ran)
    last = steps(trace, 2)[-1]
    assert (last.length[~last.active] == 0).all() and (last.selected[~last.active] == -1).all()
    assert (last.score[~last.active] == -np.inf).all()


def test_wrong_pages_and_windows():
    with pytest.raises(ValueError, match="page size 48 does not divide the capacity of 128"):
        trace_info(CONFIG, Watch(("page_bound",), page_size=48), **HEADER)
    with pytest.raises(ValueError, match="at least 1 window.*got 0"):
        trace_info(CONFIG, Watch(("prompt_selected",)), **HEADER)
    assert trace_info(CONFIG, Watch(), **HEADER).page_size is None


def test_requests_that_do_not_fit(tmp_path, params):
    header = trace_info(CONFIG, WATCH, **HEADER)
    with pytest.raises(ValueError, match="a seat holds 128"), Writer(tmp_path / "trace", header) as writer:
        record(params, CONFIG, [[1] * 120], 20, writer, WATCH)
    assert list(tmp_path.iterdir()) == []
