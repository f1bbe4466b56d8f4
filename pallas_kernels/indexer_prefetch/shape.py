"""What is static about the fused kernel: how its work is cut, who fetches, and how a record is moved.

It knows sizes and the words that the maths leaves behind for the prefetch role. It knows no PTX.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.indexer_scores import mosaic_gpu as scores

WARPS = 4  # of a warpgroup
THREADS = 128
CANDIDATES = 0x11111111  # the bits of h = 0
MARKED = 0x44444444
NO_CANDIDATES = -1  # what a seat's count starts from: the padding of its list, so that one fill serves both
LOADS = 6  # that a lane has in flight


@dataclasses.dataclass(frozen=True)
class Tuning(scores.Tuning):
    """How the work is cut, and who fetches.

    fetchers    warpgroups of the prefetch role: 1, 2 or 4. Beside four that score and one that loads, two leave 72
                registers a thread
    together    records that a warp moves at once, where LOADS loads a lane do
    nap_ns      between two looks at a tile that is not scored yet
    """

    fetchers: int = 2
    together: int = 4
    nap_ns: int = 200

    @classmethod
    def of(cls, tuning: scores.Tuning) -> Tuning:
        """The same, if it says who fetches; otherwise the usual ones do."""
        return tuning if isinstance(tuning, cls) else cls(**dataclasses.asdict(tuning))


@dataclasses.dataclass(frozen=True)
class Shape(scores.Shape):
    """Everything static about the fused kernel.

    pages_per_math is 1: a warp's word holds the 16 positions that it has of one page.
    """

    tuning: Tuning
    staging: int
    host_rows: int
    record: tuple[int, ...]
    record_bytes: int
    keeps_above: bool = False  # also says which scores exceed a bound

    @property
    def fetchers(self) -> int:
        return 1 if self.is_interpreted else self.tuning.fetchers

    @property
    def words(self) -> int:
        """Verdict words of a tile."""
        return self.tuning.math * WARPS

    @property
    def most_tiles(self) -> int:
        """Of one block."""
        return -(-self.seats * self.runs // self.tuning.blocks) * self.tuning.run

    @property
    def chunk_bytes(self) -> int:
        """What one lane moves at a time. Records lie one after another from an aligned address on."""
        return next(size for size in (16, 8, 4) if self.record_bytes % size == 0)

    @property
    def chunks(self) -> int:
        """Of a record."""
        return self.record_bytes // self.chunk_bytes

    @property
    def rows_together(self) -> int:
        return max(1, min(self.tuning.together, 32 * LOADS // self.chunks))

    @property
    def stages(self) -> int:
        """As the plain kernel's, from what the verdicts leave."""
        queries = 2 * self.rows * (self.heads * scores.WIDTH * (1 if self.is_fp8 else 2) + scores.WEIGHTS * 4)
        bytes_per_stage = self.tokens * (scores.WIDTH + 4 if self.is_fp8 else 2 * scores.WIDTH)
        room = scores.SHARED_BYTES - queries - 4 * self.words * self.most_tiles
        return min(self.tuning.stages, room // bytes_per_stage)
