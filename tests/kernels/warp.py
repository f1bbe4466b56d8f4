"""A warp that runs PTX: 32 lanes, branches that all of them take together, and memory in named regions.

It knows the instructions of the prefetch role, each as a line of NumPy, and refuses what hardware would not forgive: a
branch that lanes disagree about, an address outside every region, an access that is not aligned. It does not know what
the program is for. Memory is as of one warp at a time: warps run one after another, in whatever order a test likes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

LANES = 32
U32, U64, I32, I64, F32 = np.uint32, np.uint64, np.int32, np.int64, np.float32
COMPARE = dict(eq=np.equal, ne=np.not_equal, lt=np.less, ge=np.greater_equal, gt=np.greater)
BITS = dict(u32=U32, b32=U32, s32=I32, f32=F32, u64=U64, s64=I64)
INTEGER = dict(add=np.add, sub=np.subtract, min=np.minimum, div=np.floor_divide, mul=np.multiply)
INTEGER |= {"and": np.bitwise_and, "or": np.bitwise_or, "shl": np.left_shift, "shr": np.right_shift}


class Warp:
    """`memory` maps first addresses to arrays of bytes; `warp` is its number in the block."""

    def __init__(self, warp: int, memory: Mapping[int, np.ndarray], limit: int = 1_000_000):
        self.thread, self.memory, self.limit, self.registers = warp * LANES, memory, limit, {}
        self.steps = 0

    def run(self, text: str, *operands: int | np.ndarray) -> None:
        for index in reversed(range(len(operands))):  # $10 before $1
            self.set(f"operand{index}", np.broadcast_to(np.asarray(operands[index]), (LANES,)))
            text = text.replace(f"${index}", f"operand{index}")
        lines, labels = [], {}
        for part in text.strip()[1:-1].split(";"):
            while (label := re.match(r"\s*(\w+):\s", part + "\n")) is not None:
                labels[label[1]] = len(lines)
                part = part[label.end() :]
            if part.strip() and not part.strip().startswith(".reg"):
                lines.append(part.strip())
        at = 0
        while at < len(lines):
            self.steps += 1
            assert self.steps < self.limit, "the program does not end"
            target = self.step(lines[at])
            at = at + 1 if target is None else labels[target]

    def step(self, line: str) -> str | None:
        """Runs one instruction; returns the label it jumps to."""
        active = np.ones(LANES, bool)
        if line.startswith("@"):
            guard, line = line[1:].split(None, 1)
            active = self.value(guard.lstrip("!"), bool) ^ guard.startswith("!")
        operation, _, rest = line.partition(" ")
        if operation in ("bra", "bra.uni"):
            assert active.all() or not active.any(), f"lanes disagree about {line!r}"
            return rest.strip() if active.all() else None
        parts = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,{}\[\]]+", rest) if part.strip()]
        kind = operation.split(".")
        if kind[0] in ("ld", "st"):
            self.move(kind, parts, active)
        elif kind[0] == "atom":
            self.fetch_add(parts, active)
        elif kind[0] != "nanosleep":
            assert active.all(), f"the evaluator guards memory and branches only, not {line!r}"
            with np.errstate(over="ignore", invalid="ignore"):
                self.set(parts[0], self.compute(kind, parts[1:]))
        return None

    def compute(self, kind: list[str], source: list[str]) -> np.ndarray:
        dtype: Any = BITS.get(kind[-1], U32)
        match kind:
            case ["mov", _] | ["cvt", "u64" | "u16", "u32"]:
                return self.value(source[0])
            case ["brev", "b32"]:
                return np.array([int(f"{word:032b}"[::-1], 2) for word in self.value(source[0]).tolist()])
            case ["clz", "b32"]:
                return np.array([32 - word.bit_length() for word in self.value(source[0]).tolist()])
            case ["popc", "b32"]:
                return np.bitwise_count(self.value(source[0], U32))
            case ["selp", _]:
                return np.where(self.value(source[2], bool), self.value(source[0]), self.value(source[1]))
            case ["and", "pred"]:
                return self.value(source[0], bool) & self.value(source[1], bool)
            case ["setp", relation, *combined, _]:
                found = COMPARE[relation](self.value(source[0], dtype), self.value(source[1], dtype))
                assert combined in ([], ["and"])
                return found & self.value(source[2], bool) if combined else found
            case ["vote", "sync", "ballot", "b32"]:
                return np.full(LANES, sum(1 << lane for lane in np.flatnonzero(self.value(source[0], bool)).tolist()))
            case ["vote", "sync", "all" | "any" as how, "pred"]:
                return np.full(LANES, getattr(np, how)(self.value(source[0], bool)))
            case ["shfl", "sync", "idx", "b32"]:
                assert source[2] == "31"
                return self.value(source[0])[self.value(source[1]).astype(int) % LANES]
            case ["mul" | "mad", "wide", sign]:
                wide = I64 if sign == "s32" else U64
                product = self.value(source[0], BITS[sign]).astype(wide) * self.value(source[1], BITS[sign]).astype(
                    wide
                )
                return product.view(U64) + (self.value(source[2], U64) if kind[0] == "mad" else U64(0))
            case ["mad", "lo", _]:
                return self.value(source[0], dtype) * self.value(source[1], dtype) + self.value(source[2], dtype)
            case [name, *_] if name in INTEGER:
                return INTEGER[name](self.value(source[0], dtype), self.value(source[1], dtype))
        raise AssertionError(f"the evaluator does not know {'.'.join(kind)}")

    def move(self, kind: list[str], parts: list[str], active: np.ndarray) -> None:
        count = next((int(part[1]) for part in kind if re.fullmatch(r"v\d", part)), 1)
        data, place = (parts[1], parts[0]) if kind[0] == "st" else parts
        names = [name.strip() for name in data.strip("{}").split(",")]
        size = 2 if kind[-1] == "b16" else 4
        assert len(names) == count
        for lane in np.flatnonzero(active).tolist():
            memory, at = self.find(place, lane, size * count)
            for index, name in enumerate(names):
                word = memory[at + size * index : at + size * index + size]
                if kind[0] == "st":
                    word[:] = self.value(name, U32)[lane : lane + 1].view(np.uint8)[:size]
                else:
                    self.registers.setdefault(name, np.zeros(LANES, U64))[lane] = word.view(U32)[0]

    def fetch_add(self, parts: list[str], active: np.ndarray) -> None:
        for lane in np.flatnonzero(active).tolist():
            memory, at = self.find(parts[1], lane, 4)
            word = memory[at : at + 4].view(U32)
            self.registers[parts[0]][lane] = word[0]
            word += self.value(parts[2], U32)[lane]

    def find(self, place: str, lane: int, size: int) -> tuple[np.ndarray, int]:
        base, _, offset = place.strip("[]").partition("+")
        address = int(self.value(base.strip())[lane]) + int(offset or 0)
        assert address % size == 0, f"{place} of lane {lane} is not aligned"
        for first, memory in self.memory.items():
            if first <= address and address + size <= first + memory.size:
                return memory, address - first
        raise AssertionError(f"lane {lane} reaches outside with {place}: {address:#x}")

    def value(self, name: str, dtype: Any = U64) -> np.ndarray:
        lanes = np.arange(LANES, dtype=U64)
        if name == "%laneid":
            bits = lanes
        elif name == "%tid.x":
            bits = lanes + U64(self.thread)
        elif name == "%lanemask_lt":
            bits = (U64(1) << lanes) - U64(1)
        elif re.fullmatch(r"-?\d+|0x[0-9a-f]+", name):
            bits = np.full(LANES, int(name, 0) % 2**64, U64)
        else:
            bits = self.registers[name]
        if dtype in (U64, bool):
            return bits.astype(dtype)
        if dtype is I64:
            return bits.view(I64)
        return bits.astype(U32).view(dtype)

    def set(self, name: str, bits: np.ndarray) -> None:
        bits = np.ascontiguousarray(bits)
        if bits.dtype in (I32, F32):
            bits = bits.view(U32)
        self.registers[name] = bits.astype(U64)
