"""Stored traces: what goes in comes out, in every form; what is damaged is refused; nothing half-written stays."""

import dataclasses
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import indexer
from echo_jax.traces import OPTIONAL_FIELDS, StepScores, TraceInfo, open_trace
from echo_jax.traces.format import HEADER, STEPS, open_folder
from echo_jax.traces.writing import UnwritableTrace, Writer, gaps, rounded_up, store
from echo_jax.types import NO_POSITION

T, R, P, K, PAGE, WINDOWS = 5, 2, 24, 4, 8, 3
INFO = TraceInfo(layers=3, requests=R, steps=99, capacity=P, top_k=K, layer_kinds=("full", "shared", "full"),
                 archetypes=("recorded",) * 3, source="record", seed=7, recipe={"command": "made here"})  # fmt: skip
ALL = dataclasses.replace(INFO, fields=OPTIONAL_FIELDS, page_size=PAGE)


def steps_of(layer):
    """Row 0 has 9 positions and more; row 1 sees fewer than K at first, is idle in step 2 and begins anew in step 3."""
    random = np.random.default_rng(layer)
    for t in range(T):
        length = np.array([9 + t, (1, 2, 0, 12, 13)[t]], np.int32)
        active = np.array([True, t != 2])
        visible = np.where(active, length + 1, 0)
        is_visible = np.arange(P) < visible[:, None]
        score, guess = (np.where(is_visible, 3 * random.standard_normal((R, P)), -np.inf).astype("f4") for _ in "ab")
        chosen = indexer.select(jnp.asarray(score), jnp.asarray(visible, jnp.int32), K)
        yield StepScores(
            score=jnp.asarray(score),
            length=jnp.asarray(length),
            active=jnp.asarray(active),
            starts=jnp.asarray([t == 0, t in (0, 3)]),
            floor=jnp.full((R,), -jnp.inf),
            selected=chosen.positions,
            kth_score=chosen.kth_score,
            lookahead_score=jnp.asarray(guess),
            page_bound=jnp.asarray(random.standard_normal((R, P // PAGE)), jnp.float32),
            query_cosine=jnp.asarray(random.uniform(-1, 1, R), jnp.float32),
            prompt_selected=jnp.asarray(np.sort(random.permutation(9)[:K]) + np.zeros((R, WINDOWS, 1)), jnp.int32),
        )  # fmt: skip


def write(path, info=ALL, change=lambda step: step, **options):
    with Writer(path, info, **options) as writer:
        for layer in (0, 2):
            for step in steps_of(layer):
                writer.add(layer, change(step))
    return writer.info


def read(path, layer):
    trace = open_folder(path)
    source = trace.layer(layer)
    step = jax.jit(lambda source, t: source.step(source.init(), t)[1])
    return [jax.tree.map(np.asarray, step(source, jnp.int32(t))) for t in range(trace.info.steps)]


def test_everything_comes_back(tmp_path):
    info = write(tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    assert trace.info == info == dataclasses.replace(ALL, steps=T, nan_scores=0)
    for layer in (0, 2):
        for wanted, got in zip(steps_of(layer), read(tmp_path / "trace", layer), strict=True):
            wanted = jax.tree.map(np.asarray, wanted)
            for name in ("score", "length", "active", "starts", "floor", "selected", "kth_score", "lookahead_score",
                         "page_bound", "query_cosine"):  # fmt: skip
                np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name), err_msg=name)
            for row in np.flatnonzero(wanted.starts):
                np.testing.assert_array_equal(got.prompt_selected[row], wanted.prompt_selected[row])
    shared, full = read(tmp_path / "trace", 1), read(tmp_path / "trace", 0)
    np.testing.assert_array_equal(shared[1].score, full[1].score)


def test_fields_are_none_where_a_trace_lacks_them(tmp_path):
    write(tmp_path / "trace", INFO)
    for step in read(tmp_path / "trace", 0):
        assert all(getattr(step, name) is None for name in OPTIONAL_FIELDS)


def test_half_precision_rounds_scores_and_never_lowers_a_bound(tmp_path):
    write(tmp_path / "trace", dataclasses.replace(ALL, score_dtype="float16"))
    for wanted, got in zip(steps_of(0), read(tmp_path / "trace", 0), strict=True):
        wanted = jax.tree.map(np.asarray, wanted)
        np.testing.assert_array_equal(got.score, wanted.score.astype(np.float16).astype(np.float32))
        np.testing.assert_array_equal(got.kth_score, wanted.kth_score)
        assert (got.page_bound >= wanted.page_bound).all() and (got.page_bound != wanted.page_bound).any()
        np.testing.assert_allclose(got.page_bound, wanted.page_bound, rtol=1e-3)


def test_a_band_keeps_the_best(tmp_path):
    band = 7
    write(tmp_path / "trace", dataclasses.replace(ALL, band=band))
    for wanted, got in zip(steps_of(2), read(tmp_path / "trace", 2), strict=True):
        wanted = jax.tree.map(np.asarray, wanted)
        for row in range(R):
            visible = int(wanted.visible[row])
            best = sorted(range(visible), key=lambda s, row=row, w=wanted: -w.score[row, s])
            for name, kept in (("score", best[:band]), ("lookahead_score", None)):
                values, listed = getattr(wanted, name)[row], getattr(got, name)[row]
                if kept is None:
                    kept = sorted(range(visible), key=lambda s, values=values: -values[s])[:K]
                np.testing.assert_array_equal(np.flatnonzero(np.isfinite(listed)), sorted(kept))
                np.testing.assert_array_equal(listed[kept], values[kept])
            assert got.floor[row] == (wanted.score[row, best[band - 1]] if visible > band else -np.inf)
        np.testing.assert_array_equal(got.selected, wanted.selected)


def test_nan_scores_are_counted_and_kept(tmp_path):
    def spoil(step):
        # one that is seen, in each step and layer, and one that is not
        return step._replace(score=step.score.at[0, 3].set(jnp.nan).at[0, P - 1].set(jnp.nan))

    for band in (None, 7):
        path = tmp_path / f"trace{band}"
        info = write(path, dataclasses.replace(INFO, band=band), spoil)
        assert info.nan_scores == 2 * T == open_folder(path).info.nan_scores
        listed = np.stack([step.score[0] for step in read(path, 0)])
        assert np.isnan(listed[:, 3]).all() if band is None else not np.isnan(listed).any(), "a band has the best"


def test_a_synthetic_trace_can_be_stored(tmp_path):
    name = "synth:churny,top_k=16,steps=9,requests=2,layers=2,request_steps=5"
    made = open_trace(name)
    info = store(made, Writer(tmp_path / "trace", made.info))
    stored = open_folder(tmp_path / "trace")
    assert stored.info == info == made.info
    source, step = made.layer(1), jax.jit(lambda source, carry, t: source.step(carry, t))
    carry = source.init()
    for t, got in enumerate(read(tmp_path / "trace", 1)):
        carry, wanted = step(source, carry, jnp.int32(t))
        np.testing.assert_allclose(got.score, wanted.score, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.starts, wanted.starts)
        chosen = indexer.select(jnp.asarray(got.score), jnp.asarray(got.visible), 16)
        np.testing.assert_array_equal(got.selected, chosen.positions)
        np.testing.assert_array_equal(got.kth_score, chosen.kth_score)


def test_gaps():
    positions = np.array(
        [[0, 1, 5], [7, 9, NO_POSITION], [NO_POSITION] * 3, [65534, NO_POSITION, NO_POSITION]], np.int32
    )
    small = gaps(positions, 2**16 - 1)
    assert small.dtype == np.uint16 and gaps(positions, 2**16).dtype == np.uint32
    assert small.tolist() == [[1, 1, 4], [8, 2, 0], [0, 0, 0], [65535, 0, 0]]


def test_rounding_up():
    values = np.array([1.0001, -1.0001, 0.5, -np.inf], np.float32)
    rounded = rounded_up(values, "float16")
    assert rounded.dtype == np.float16 and (rounded >= values).all() and rounded[2] == 0.5 and rounded[3] == -np.inf


# ---- refused ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "trace")
    return tmp_path / "trace"


def edit(folder, **changes):
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps({k: v for k, v in (header | changes).items() if v != "gone"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema version 2 but .* reads 1; record"),
        ({"schema": "gone"}, "schema version None"),
        ({"top_k": "gone"}, r"\['top_k'\]"),
        ({"colour": 3}, r"\['colour'\]"),
        ({"steps": 0}, "empty: 0 steps"),
        ({"requests": 0}, "empty: 0 requests"),
        ({"layers": 0}, "empty: 0 layers"),
        ({"layers": 2}, "2 layers but kinds"),
        ({"steps": 6}, r"length .* has shape \[5, 2\] but the header says \[6, 2\]"),
    ],
)
def test_a_header_that_does_not_fit(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        open_folder(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 32}, r"score .*\[5, 2, 24\].*\[5, 2, 32\]"),
        ({"band": 8}, "score"),
        ({"top_k": 5}, "selected_gap"),
    ],
)
def test_a_layer_that_does_not_fit_its_header(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        open_folder(folder).layer(0)


def test_a_field_that_is_announced_and_missing(tmp_path):
    write(tmp_path / "trace", INFO)
    edit(tmp_path / "trace", fields=["prompt_selected"])
    with pytest.raises(ValueError, match="prompt's sets of 3 requests"):
        open_folder(tmp_path / "trace").layer(0)


@pytest.mark.parametrize("name", [HEADER, STEPS, "layer_002.npz"])
def test_truncated_anywhere(folder, name):
    """At every eighth of the file, and empty."""
    whole = (folder / name).read_bytes()
    for part in range(8):
        (folder / name).write_bytes(whole[: len(whole) * part // 8])
        with pytest.raises(ValueError, match="truncated|damaged"):
            open_folder(folder)


def test_a_flipped_bit_is_found_when_the_layer_is_read(folder):
    path = folder / "layer_000.npz"
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo("score.npy")
    content = bytearray(path.read_bytes())
    content[entry.header_offset + 30 + len("score.npy") + 40 + entry.compress_size // 2] ^= 4
    path.write_bytes(bytes(content))
    trace = open_folder(folder)
    with pytest.raises(ValueError, match="layer_000.npz' is truncated or damaged"):
        trace.layer(0)
    trace.layer(2)


def test_a_missing_layer(folder):
    (folder / "layer_002.npz").unlink()
    with pytest.raises(ValueError, match="lacks layer_002.npz"):
        open_folder(folder)


def test_no_row_is_ever_active(tmp_path):
    write(tmp_path / "trace", INFO, lambda step: step._replace(active=step.active & False))
    with pytest.raises(ValueError, match="no request in any of its 5 steps"):
        open_folder(tmp_path / "trace")


def test_names_that_are_no_trace(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_trace(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no header.json"):
        open_trace(tmp_path)
    with pytest.raises(ValueError, match="'echo-tiny-manuel' .*did you mean 'echo-tiny-manual'"):
        open_trace("echo-tiny-manuel")


# ---- writing ---------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_trace_that_failed(tmp_path):
    def fail(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "trace", change=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_when_asked_and_only_by_a_whole_one(folder):
    with pytest.raises(FileExistsError, match="another path, or overwrite"):
        write(folder)
    with pytest.raises(ValueError, match="add every step"):
        with Writer(folder, INFO, overwrite=True) as writer:
            writer.add(0, next(steps_of(0)))
    assert open_folder(folder).info.fields == OPTIONAL_FIELDS
    write(folder, INFO, overwrite=True)
    assert open_folder(folder).info.fields == ()
    (folder / HEADER).unlink()
    with pytest.raises(FileExistsError, match="it is no trace"):
        write(folder, overwrite=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"band": 3}, "band of 3 .* 4 selected"),
        ({"score_dtype": "bfloat16"}, "'bfloat16' is unknown; use one of: float16, float32"),
    ],
)
def test_what_a_writer_refuses_at_once(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Writer(tmp_path / "trace", dataclasses.replace(INFO, **changes))


def test_what_a_writer_refuses_of_steps(tmp_path):
    with pytest.raises(UnwritableTrace, match="0 steps"):
        with Writer(tmp_path / "trace", INFO):
            pass
    with pytest.raises(UnwritableTrace, match="100000 does not fit float16; store scores as float32"):
        write(tmp_path / "trace", dataclasses.replace(INFO, score_dtype="float16"),
              lambda step: step._replace(score=step.score.at[0, 1].set(1e5)))  # fmt: skip
    with pytest.raises(ValueError, match="query_cosine but a step has none"):
        write(tmp_path / "trace", ALL, lambda step: step._replace(query_cosine=None))
    assert list(tmp_path.iterdir()) == []
