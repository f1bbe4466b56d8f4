"""The PTX of the prefetch role and of the verdicts it reads, run warp by warp: what a whole kernel stages.

The interpreter of Mosaic kernels cannot run PTX, and a compile shows only that it is PTX. Here the blocks of a call run
one after another on a small evaluator, their maths played by NumPy; the judge is the one of the other tests.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.indexer_prefetch import ahead, cases
from pallas_kernels.indexer_prefetch.shape import Shape, Tuning
from pallas_kernels.indexer_scores import cases as scores
from tests.kernels.warp import LANES, Warp

# Where each array begins for the evaluator; the pool is far above 4 GiB, and so is what is staged.
PLACES = dict(page_numbers=2**20, lengths=2**21, cap=2**22, slot_of=2**23, pool=2**44, layer=2**25)
RESULTS = dict(candidates=2**26, rows=2**27, records=2**40)
PREFETCH_WARPS = 20  # of the block: four warpgroups of maths and one that loads come before
ONE_BLOCK = Tuning(math=4, blocks=1)
CUT_TILES = Tuning(math=3, blocks=5, fetchers=1)
CUT_RUNS = Tuning(math=2, blocks=3, run=2, fetchers=4)


def words(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Napping(Warp):
    """What is still to come goes on while this warp naps."""

    def __init__(self, warp, memory, to_come):
        super().__init__(warp, memory)
        self.to_come = to_come

    def step(self, line):
        if line.startswith("nanosleep"):
            self.to_come.pop(0)()  # IndexError: it waits for what does not come
        return super().step(line)


def kernel(inputs, found, tuning, is_late=False):
    """What the prefetch role of all blocks makes of scores f32[B, T, P]; the last block goes first. If `is_late`, tiles
    are scored one by one, whenever a warp naps, else all before it begins.
    """
    seats, rows, _ = found.shape
    page_numbers, host_pool = inputs.scored[3], inputs.host_pool
    shape = Shape(
        *(seats, rows, 8, page_numbers.shape[1], True, tuning, False),
        staging=inputs.staging,
        host_rows=host_pool.shape[1],
        record=host_pool.shape[2:],
        record_bytes=host_pool[0, 0].nbytes,
    )
    given = dict(page_numbers=page_numbers, lengths=inputs.lengths, cap=inputs.cap, slot_of=inputs.slot_of)
    given |= dict(pool=host_pool, layer=inputs.layer.reshape(1))
    candidates = np.full((seats,), ahead.NO_CANDIDATES, np.int32)
    listed = np.full((seats, inputs.staging), -1, np.int32)
    records = np.full((seats, inputs.staging, *shape.record), 0xDEAD, np.uint32)
    results = dict(candidates=words(candidates), rows=words(listed), records=words(records))
    device = {PLACES[name]: words(array) for name, array in given.items()}
    device |= {RESULTS[name]: array for name, array in results.items()}
    addresses = [*PLACES.values(), *RESULTS.values()]
    for block in reversed(range(tuning.blocks)):
        verdicts = np.full(4 * shape.words * shape.most_tiles, 0xFF, np.uint8)  # garbage of the kernel before
        for warp in range(ahead.WARPS):
            Warp(PREFETCH_WARPS + warp, {64: verdicts}).run(ahead.clearing(shape), 64)
        assert not verdicts.any()
        work = max(0, -(-(seats * shape.runs - block) // tuning.blocks)) * tuning.run
        to_come = []
        for index in range(work):
            seat, of_seat = divmod(block + index // tuning.run * tuning.blocks, shape.runs)
            tile = of_seat * tuning.run + index % tuning.run
            to_come.append(functools.partial(score_tile, shape, inputs, found, verdicts, index, seat, tile))
        while to_come and not is_late:
            to_come.pop(0)()
        for warp in reversed(range(shape.fetchers * ahead.WARPS)):
            role = Napping(PREFETCH_WARPS + warp, {64: verdicts, **device}, to_come)
            role.run(ahead.program(shape), 64, *addresses, block, work)
    count = np.minimum(candidates + 1, np.clip(inputs.cap, 0, inputs.staging))
    return found, listed, records, count, candidates + 1 - count


def score_tile(shape, inputs, found, verdicts, index, seat, tile):
    """The math role's part: the verdicts on a tile, page by page, row by row; none where a seat has no more pages."""
    for part in range(shape.tuning.math):
        page = tile * shape.tuning.math + part
        for row in range(shape.rows if page < shape.page_count else 0):
            of_page = found[seat, row, page * 64 : page * 64 + 64]
            for warp in range(ahead.WARPS):
                place = 16 * warp + np.arange(LANES) // 4  # of wgmma's layout: lane 4 q + t has rows q and q + 8
                pair = [of_page[place + high].view(np.uint32) for high in (0, 8)]
                text = ahead.ballot(is_first=row == 0, is_last=row == shape.rows - 1)
                word = index * shape.words + part * ahead.WARPS
                threshold = inputs.threshold[seat : seat + 1].view(np.uint32)
                Warp(4 * part + warp, {64: verdicts}).run(text, 64, word, threshold, *pair)


@functools.cache
def plain_scores():
    return jax.jit(functools.partial(pallas_kernels.indexer_scores, implementation="reference"))


@pytest.mark.parametrize("case", cases.CORNERS + cases.FAR[:3], ids=cases.identifier)
@pytest.mark.parametrize("tuning", [ONE_BLOCK, CUT_TILES, CUT_RUNS], ids=["one_block", "cut_tiles", "cut_runs"])
def test_the_ptx_keeps_every_promise(case, tuning):
    inputs = cases.make(case)
    found = np.asarray(plain_scores()(*inputs.scored))
    inputs.judge(kernel(inputs, found, tuning), found)


def test_tiles_are_taken_as_they_are_scored():
    """A tile is scored whenever a warp naps, and none is lost."""
    inputs = cases.make(next(case for case in cases.CORNERS if case.name == "everything_passes"))
    found = np.asarray(plain_scores()(*inputs.scored))
    inputs.judge(kernel(inputs, found, dataclasses.replace(ONE_BLOCK, math=1), is_late=True), found)


def test_a_score_that_is_not_a_number_is_no_candidate():
    """And an infinite one is, where the threshold is finite."""
    inputs = cases.make(dataclasses.replace(cases.CORNERS[0], resident=0.0))
    found = np.array(plain_scores()(*inputs.scored))
    found[:, :, ::3], found[:, :, 1::3] = np.nan, np.inf
    totals = inputs.judge(kernel(inputs, found, Tuning(blocks=2)), found)
    assert totals[0] >= 85 and totals[1] >= 66


def test_a_page_without_a_number_has_no_candidates():
    """Wherever its scores come from: no address is made of it."""
    inputs = cases.make(dataclasses.replace(cases.CORNERS[0], resident=0.0))
    found = np.array(plain_scores()(*inputs.scored))
    inputs.scored[3][0, :3] = -1, 2**31 - 1, inputs.slot_of.size // 64
    found[0], inputs.threshold[0] = 1.0, 0.0
    totals = inputs.judge(kernel(inputs, found, Tuning(blocks=2)), found)
    assert totals[0] == 255 - 3 * 64


def test_rows_beyond_two_gib_are_found():
    """row * 656 passes 2^32 at row 6,547,206, an i32 at half of it; the evaluator has no room for what lies between."""
    case = cases.Case(scores.Case("far", "fp8", ((64,),), pages=1), (0.5,), (64,), staging=64, resident=0.0)
    inputs = cases.make(case)
    found = np.asarray(plain_scores()(*inputs.scored))
    first, count = 109_999 * 64, 64
    host_rows = first + count
    shape = Shape(
        *(1, 1, 8, 1, True, Tuning(math=1, blocks=1, fetchers=1), False),
        staging=64,
        host_rows=host_rows,
        record=(164,),
        record_bytes=656,
    )
    verdicts = np.zeros(4 * shape.words, np.uint8)
    score_tile(shape, inputs, found, verdicts, 0, 0, 0)
    layer, pool = 3, np.arange(count * 164, dtype=np.uint32).reshape(count, 164)
    candidates, listed = np.full(1, -1, np.int32), np.full((1, 64), -1, np.int32)
    records = np.zeros((1, 64, 164), np.uint32)
    memory = {
        64: verdicts,
        PLACES["page_numbers"]: words(np.array([first // 64], np.int32)),
        PLACES["lengths"]: words(np.array([63], np.int32)),
        PLACES["cap"]: words(np.array([64], np.int32)),
        PLACES["slot_of"] + 4 * first: words(np.full(count, -1, np.int32)),
        PLACES["pool"] + (layer * host_rows + first) * 656: words(pool),
        PLACES["layer"]: words(np.array([layer], np.int32)),
        RESULTS["candidates"]: words(candidates),
        RESULTS["rows"]: words(listed),
        RESULTS["records"]: words(records),
    }
    for warp in range(ahead.WARPS):
        Warp(warp, memory).run(ahead.program(shape), 64, *PLACES.values(), *RESULTS.values(), 0, 1)
    wanted = {first + position for position in range(63) if found[0, 0, position] > inputs.threshold[0]}
    taken = int(candidates[0]) + 1
    assert wanted and set(listed[0, :taken].tolist()) == wanted and (listed[0, taken:] == -1).all()
    np.testing.assert_array_equal(records[0, :taken], pool[listed[0, :taken] - first])
