"""The PTX of sparse MLA, run by a small evaluator over all threads of a role: what it writes, byte by byte.

The interpreter of Mosaic kernels cannot run PTX, and a compile shows only that it is PTX. This file knows the few
instructions that `gather` and `join` use, each as a line of NumPy, and what they must leave where.
"""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.sparse_mla import cases, extent, gather, join

THREADS = 128
FAR = 2**24  # from one block's shared memory to the next one's, as `mapa` sees it here
POOL = 4096  # where the pool begins in the evaluator's device memory


class Threads:
    """Registers by name, as u64 bits a thread; device memory; shared memory of this block, and of its cluster."""

    def __init__(
        self, device: np.ndarray, shared: np.ndarray, first: int = 256, count: int = THREADS, cluster: Any = ()
    ):
        self.device, self.shared, self.count, self.cluster, self.registers = device, shared, count, cluster, {}
        self.first, self.touched, self.asked = first, 0, []

    def run(self, text: str, *operands: int | str | np.ndarray) -> None:
        for index, value in reversed(list(enumerate(operands))):  # $12 before $1
            if isinstance(value, np.ndarray):
                self.set(f"operand{index}", value.astype(np.uint32))
            text = text.replace(f"${index}", f"operand{index}" if isinstance(value, np.ndarray) else str(value))
        for line in text[1:-1].split(";"):
            line = line.strip()
            if line and not line.startswith(".reg"):
                self.step(line)

    def step(self, line: str) -> None:
        active = np.ones(self.count, bool)
        if line.startswith("@"):
            predicate, line = line[1:].split(" ", 1)
            active = self.value(predicate).astype(bool)
        operation, rest = line.split(None, 1) if " " in line else (line, "")
        groups = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+", rest) if part.strip()]
        names = [[name.strip() for name in part.strip("{}").split(",")] for part in groups]
        one = [part[0] for part in names]
        u32, u64, f32 = np.uint32, np.uint64, np.float32
        match operation:
            case "mov.u32" | "mov.b32" | "mov.f32" if len(names[0]) == 2:
                word = self.value(one[1], u32)
                self.set(names[0][0], word & u32(0xFFFF))
                self.set(names[0][1], word >> u32(16))
            case "mov.u32" | "mov.b32" | "mov.f32" | "cvt.u64.u32" | "cvta.to.global.u64":
                self.set(one[0], self.value(one[1]))
            case "shl.b32":
                self.set(one[0], self.value(one[1], u32) << self.value(one[2], u32))
            case "shr.u32":
                self.set(one[0], self.value(one[1], u32) >> self.value(one[2], u32))
            case "and.b32":
                self.set(one[0], self.value(one[1], u32) & self.value(one[2], u32))
            case "xor.b32":
                self.set(one[0], self.value(one[1], u32) ^ self.value(one[2], u32))
            case "add.u32":
                self.set(one[0], self.value(one[1], u32) + self.value(one[2], u32))
            case "add.u64":
                self.set(one[0], self.value(one[1]) + self.value(one[2]))
            case "mad.lo.u32":
                self.set(one[0], self.value(one[1], u32) * self.value(one[2], u32) + self.value(one[3], u32))
            case "mad.wide.u32":
                self.set(one[0], self.value(one[1], u32).astype(u64) * self.value(one[2], u32) + self.value(one[3]))
            case "max.s32":
                signed = self.value(one[1], u32).view(np.int32)
                self.set(one[0], np.maximum(signed, np.int32(self.value(one[2])[0])).view(u32))
            case "setp.ge.s32" | "setp.ge.and.s32":
                assert one[2] == "0"
                also = self.value(one[3]).astype(bool) if ".and." in operation else True
                self.set(one[0], (self.value(one[1], u32).view(np.int32) >= 0) & also)
            case "setp.lt.u32" | "setp.lt.and.u32":
                also = self.value(one[3]).astype(bool) if ".and." in operation else True
                self.set(one[0], (self.value(one[1], u32) < self.value(one[2], u32)) & also)
            case "max.u32":
                self.set(one[0], np.maximum(self.value(one[1], u32), self.value(one[2], u32)))
            case "vote.sync.ballot.b32":
                votes = self.value(one[1]).astype(bool).reshape(-1, 32)
                words = (votes * (np.uint64(1) << np.arange(32, dtype=u64))).sum(1)
                self.set(one[0], np.repeat(words, 32))
            case "popc.b32":
                self.set(one[0], np.bitwise_count(self.value(one[1], u32)))
            case "cp.async.bulk.prefetch.L2.global":
                self.asked += [(start - POOL, int(one[1])) for start in self.address(one[0])[active]]
            case "cp.async.bulk.global.shared::cta.bulk_group":
                to, start, size = self.address(one[0]), self.address(one[1]), self.value(one[2]).astype(np.int64)
                for thread in np.flatnonzero(active):
                    piece, at = np.arange(size[thread]), to[thread]
                    assert not (at % 16 or start[thread] % 16 or len(piece) % 16), "a copy is not aligned"
                    assert (self.device[at + piece] == 0xEE).all(), "a result is written twice"
                    self.device[at + piece] = self.shared[start[thread] + piece]
            case "selp.b32" | "selp.f32":
                self.set(one[0], np.where(self.value(one[3]).astype(bool), self.value(one[1]), self.value(one[2])))
            case "cvt.rn.f16x2.e4m3x2":
                codes = self.value(one[1], np.uint16).view(np.uint8).view(ml_dtypes.float8_e4m3fn)
                self.set(one[0], codes.astype(np.float16).view(u32))
            case "cvt.f32.f16":
                self.set(one[0], self.value(one[1], np.uint16).view(np.float16).astype(f32).view(u32))
            case "mul.rn.f32":
                self.set(one[0], (self.value(one[1], u32).view(f32) * self.value(one[2], u32).view(f32)).view(u32))
            case "cvt.rn.bf16x2.f32":
                high, low = (self.value(name, u32).view(f32).astype(ml_dtypes.bfloat16) for name in one[1:])
                self.set(one[0], np.stack([low, high], axis=1).view(u32)[:, 0])
            case "cp.async.cg.shared.global.L2::128B":
                assert one[2] == "16"
                size = self.value(one[3])
                piece = self.read(self.device, self.address(one[1]), 16)
                piece[np.arange(16)[None] >= size[:, None]] = 0
                self.write(self.address(one[0]), piece)
            case "max.f32" | "sub.rn.f32" | "add.rn.f32" | "div.full.f32":
                compute = dict(max=np.maximum, sub=np.subtract, add=np.add, div=np.divide)[operation.split(".")[0]]
                self.set(one[0], compute(*(self.value(name, u32).view(f32) for name in one[1:])).view(u32))
            case "fma.rn.f32":
                a, b, c = (self.value(name, u32).view(f32).astype(np.float64) for name in one[1:])
                self.set(one[0], (a * b + c).astype(f32).view(u32))
            case "ex2.approx.f32" | "lg2.approx.f32":
                compute = np.exp2 if operation.startswith("ex2") else np.log2
                self.set(one[0], compute(self.value(one[1], u32).view(f32)).view(u32))
            case "setp.eq.f32" | "setp.gt.f32" | "setp.eq.u32":
                kind = f32 if operation.endswith("f32") else u32
                a, b = (self.value(name, u32).view(kind) for name in one[1:])
                self.set(one[0], a > b if ".gt." in operation else a == b)
            case "mapa.shared::cluster.u32":
                self.set(one[0], self.value(one[1], u32) + self.value(one[2], u32) * u32(FAR))
            case "ld.shared::cluster.f32" | "ld.shared::cluster.v4.f32":
                for index, name in enumerate(names[0]):
                    address = self.address(one[1]) + 4 * index
                    blocks = np.stack([block.view(u32) for block in self.cluster])
                    self.set(name, blocks[address // FAR, address % FAR // 4])
            case "st.global.f32" | "st.global.v4.f32":
                words = np.stack([self.value(name, u32) for name in names[1]], axis=1)[active].view(np.uint8)
                at = self.address(one[0])[active][:, None] + np.arange(words.shape[1])
                assert (self.device[at] == 0xEE).all(), "a result is written twice"
                self.device[at] = words
            case "cp.async.commit_group" | "cp.async.bulk.commit_group" | "cp.async.bulk.wait_group.read":
                pass
            case _ if (load := re.fullmatch(r"ld\.global\.nc\.(?:v(\d)\.)?[bf]32", operation)) is not None:
                count = int(load[1] or 1)
                address = np.where(active, self.address(one[1]), 0)
                words = self.read(self.device, address, 4 * count).view(u32)
                assert len(names[0]) == count and (address % (4 * count) == 0).all(), "a load is not aligned"
                for index, name in enumerate(names[0]):
                    before = self.registers.get(name, np.zeros(self.count, u64))
                    self.set(name, np.where(active, words[:, index], before))
            case "st.shared.v4.b32":
                words = np.stack([self.value(name, u32) for name in names[1]], axis=1)
                self.write(self.address(one[0]), words.view(np.uint8))
            case _:
                raise AssertionError(f"the evaluator does not know {line!r}")

    def value(self, name: str, dtype: Any = np.uint64) -> np.ndarray:
        if name == "%tid.x":
            bits = np.arange(self.count, dtype=np.uint64) + np.uint64(self.first)
        elif name == "%laneid":
            bits = np.arange(self.count, dtype=np.uint64) % np.uint64(32)
        elif re.fullmatch(r"\d+", name):
            bits = np.full(self.count, int(name), np.uint64)
        elif name.startswith("0f"):
            bits = np.full(self.count, int(name[2:], 16), np.uint64)
        else:
            bits = self.registers[name]
        return bits.astype(dtype)

    def set(self, name: str, bits: np.ndarray) -> None:
        self.registers[name] = bits.astype(np.uint64)

    def address(self, text: str) -> np.ndarray:
        base, _, offset = text.strip("[]").partition("+")
        return (self.value(base.strip()) + np.uint64(int(offset or 0))).astype(np.int64)

    def read(self, memory: np.ndarray, address: np.ndarray, count: int) -> np.ndarray:
        return np.ascontiguousarray(memory[address[:, None] + np.arange(count)])

    def write(self, address: np.ndarray, piece: np.ndarray) -> None:
        assert (address % 16 == 0).all(), "a store is not aligned"
        # 8 threads share a cycle of shared memory: their pieces must lie in different banks.
        assert all(len(set(group)) == 8 for group in (address // 16 % 8).reshape(-1, 8)), "a store has bank conflicts"
        self.shared[address[:, None] + np.arange(piece.shape[1])] = piece
        self.touched += piece.size


def unswizzled(tile: np.ndarray) -> np.ndarray:
    """Bytes of a tile -> bf16[64, 576], by TMA's rule: 8 x 64 tiles one after another, 16-byte pieces xor row."""
    blocks = tile.view(ml_dtypes.bfloat16).reshape(8, 9, 8, 8, 8)
    row = np.arange(8)
    pieces = blocks[:, :, row[:, None], np.arange(8)[None] ^ row[:, None]]
    return pieces.transpose(0, 2, 1, 3, 4).reshape(64, 576)


def gathering(device: np.ndarray, shared: np.ndarray, text: str, listed: np.ndarray, gatherers: int, *operands: int):
    """Runs `text` by the third warpgroup of a block, or by the third and the fourth, each thread with its own slots.

    The slots are the second half of a list of 128 places, as the threads themselves read them."""
    places = np.concatenate([np.full(64, -7, np.int32), listed]).view(np.uint8)
    warpgroups = []
    for number in range(gatherers):
        threads = Threads(device, shared, 256 + 128 * number)
        threads.device, held = places, []
        for index in range(2 // gatherers):
            threads.run(gather.own_slot(gatherers, index), "own", 0, 64)
            held.append(threads.value("own", np.uint32))
        threads.device = device
        if text == gather.convert_fp8(2):
            words = [f"word{index}" for index in range(len(gather.AHEAD))]
            threads.run(gather.load_fp8(), *words, POOL, held[0])
            held += [threads.value(word, np.uint32) for word in words]
        threads.run(text, *operands, *held)
        warpgroups.append(threads)
    return warpgroups


@pytest.mark.parametrize("gatherers", [1, 2])
@pytest.mark.parametrize("record_format", ["bf16", "fp8"])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_ptx_fills_a_tile_with_the_rows_of_the_list(record_format, stage, gatherers):
    case = cases.Case("gather", record_format, ((100, 128),))
    inputs = cases.make(case)
    device, shared = np.zeros(2**20, np.uint8), np.full(3 * 64 * 1152, 0xEE, np.uint8)
    device[POOL : POOL + inputs.records.nbytes] = inputs.records.reshape(-1).view(np.uint8)
    text = gather.convert_fp8(gatherers) if record_format == "fp8" else gather.copy_bf16(gatherers)
    listed = inputs.slots[0, 0, 64:]  # the list ends in this tile
    warpgroups = gathering(device, shared, text, listed, gatherers, POOL, 0, stage)

    tile = unswizzled(shared[stage * 64 * 1152 : (stage + 1) * 64 * 1152])
    wanted = np.stack([inputs.rows.get(slot, np.zeros(576)) for slot in listed.tolist()]).astype(np.float32)
    np.testing.assert_array_equal(tile.view(np.uint16), wanted.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert sum(threads.touched for threads in warpgroups) == 64 * 1152, "each byte is written once"
    others = np.delete(shared.reshape(3, -1), stage, axis=0)
    assert (others == 0xEE).all(), "another stage was written"


@pytest.mark.parametrize("gatherers", [1, 2])
@pytest.mark.parametrize(("record_format", "size"), [("fp8", 656), ("bf16", 1152)])
def test_the_l2_is_asked_for_each_listed_row_once(record_format, size, gatherers):
    listed = cases.make(cases.Case("gather", record_format, ((100,),))).slots[0, 0, 64:]
    none = np.zeros(0, np.uint8)
    warpgroups = gathering(none, none, gather.ask(size, gatherers), listed, gatherers, POOL)
    asked = sorted(asked for threads in warpgroups for asked in threads.asked)
    assert asked == sorted((size * int(slot), size) for slot in listed if slot >= 0)


@pytest.mark.parametrize(
    ("listed", "first", "most", "tiles", "wanted"),
    [
        (0, 0, 32, 32, (1, 0)),
        (1, 0, 32, 32, (1, 1)),
        (64, 0, 32, 32, (1, 64)),
        (65, 0, 32, 32, (2, 1)),
        (2048, 0, 32, 32, (32, 64)),
        (2047, 28, 4, 32, (4, 63)),
        (700, 8, 4, 32, (3, 60)),
        (700, 12, 4, 32, (1, 0)),
        (64 * 40 - 30, 0, 40, 40, (40, 34)),  # more tiles than a warp has lanes
        (64 * 5, 4, 2, 5, (1, 64)),  # the last part is shorter than the others
    ],
)
def test_a_part_s_tiles_and_its_last_one_s_records_are_counted(listed, first, most, tiles, wanted):
    slots = np.where(np.arange(64 * (tiles + 2)) < listed, 7, -1).astype(np.int32)
    slots[64 * tiles :] = 9  # the next row's
    threads = Threads(slots.view(np.uint8), np.zeros(0, np.uint8))
    threads.run(extent.tiles_voted(most, tiles), "found", 0, first)
    count = threads.value("found", np.uint32)
    threads.run(extent.records_voted(), "inside", 0, first + int(count[0]) - 1)
    inside = threads.value("inside", np.uint32)
    assert (set(count.tolist()), set(inside.tolist())) == ({wanted[0]}, {wanted[1]})


@pytest.mark.parametrize("heads", [8, 64])
def test_a_block_sends_the_part_it_left(heads):
    """Each half by its own warpgroup, each value once, and no head behind the last."""
    random = np.random.default_rng(0)
    values, logarithms = random.standard_normal((64, 512), np.float32), random.standard_normal(64).astype(np.float32)
    tiles, beside, out, lse = 512, 2**18, 1024, 2**17 + 2**16
    shared, device = np.zeros(2**18 + 1024, np.uint8), np.full(2**18, 0xEE, np.uint8)
    shared[tiles : tiles + 64 * 4 * join.PITCH].view(np.float32).reshape(64, join.PITCH)[:, :512] = values
    shared[beside : beside + 256].view(np.float32)[:] = logarithms
    for role in (0, 1):
        Threads(device, shared, 128 * role).run(join.sending(role), tiles, beside, out, lse, heads)
    np.testing.assert_array_equal(device[out:].view(np.float32)[: 512 * heads].reshape(heads, 512), values[:heads])
    np.testing.assert_array_equal(device[lse:].view(np.float32)[:heads], logarithms[:heads])
    assert (device != 0xEE).sum() <= 4 * 513 * heads


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_the_blocks_of_a_cluster_join_their_parts(parts):
    """Some heads have nothing in some parts, one has nothing at all; each result is written once, by one block."""
    random = np.random.default_rng(0)
    values = random.standard_normal((parts, 64, 512), np.float32)
    logarithms = random.normal(0, 3, (parts, 64)).astype(np.float32)
    logarithms[random.random((parts, 64)) < 0.3] = -np.inf
    logarithms[:, 7] = -np.inf
    heads = 56  # the others are not there
    values[np.isneginf(logarithms)] = 0
    tiles, beside = 512, 2**18
    blocks = []
    for part in range(parts):
        block = np.zeros(2**18 + 1024, np.uint8)
        rows = block[tiles : tiles + 64 * 4 * join.PITCH].view(np.float32).reshape(64, join.PITCH)
        rows[:, :512] = values[part]
        block[beside : beside + 256].view(np.float32)[:] = logarithms[part]
        blocks.append(block)
    device = np.full(2**18, 0xEE, np.uint8)
    out, lse = 1024, 2**17 + 2**16
    with np.errstate(divide="ignore"):
        for part in range(parts):
            threads = Threads(device, blocks[part], 0, 256, blocks)
            threads.run(join.joining(parts), tiles, beside, out, lse, part, heads)
        weights = np.exp(logarithms.astype(np.float64) - np.where(np.isneginf(logarithms.max(0)), 0, logarithms.max(0)))
        mass = weights.sum(0)
        wanted_lse = np.log(mass) + np.where(np.isneginf(logarithms.max(0)), 0, logarithms.max(0))
    wanted = np.einsum("ph,phd->hd", weights, values) / np.where(mass > 0, mass, 1)[:, None]
    joined = device[out : out + 64 * 2048].view(np.float32).reshape(64, 512)
    np.testing.assert_allclose(joined[:heads], wanted[:heads], rtol=2e-5, atol=2e-6)
    found_lse = device[lse : lse + 256].view(np.float32)
    np.testing.assert_allclose(found_lse[:heads], wanted_lse[:heads], rtol=1e-5, atol=1e-5)
    assert (joined[heads:].view(np.uint8) == 0xEE).all() and (found_lse[heads:].view(np.uint8) == 0xEE).all()
