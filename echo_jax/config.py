"""The sizes and choices of a cache, checked when they are built. Static: nothing here is an array.

Knows numbers and whether they fit together. What the policies in it do is the business of `threshold` and `eviction`.
"""

from __future__ import annotations

import dataclasses

from echo_jax import _ffi, checks
from echo_jax.formats import KeyFormat, RecordFormat
from echo_jax.types import PAGE, EvictionPolicy, ThresholdPolicy

NO_CAP = float("inf")

COMPILER_OPTIONS = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
"""For the `jax.jit` of a step, as `compiler_options`: on a GPU, kernels of its graph that do not wait for each other
run side by side. As XLA makes a graph by default (jax 0.11.2) they run one after the other, and what is read ahead, or
copied on a second stream, hides behind nothing. It costs memory: 231 MiB more of temporary buffers for 61 layers of
DeepSeek-V3.2, 16 x 65,536 positions. A CPU takes no notice."""


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """One worker's cache. A variant is `dataclasses.replace(config, top_k=512)`."""

    layer_kinds: tuple[str, ...]  # "full" or "shared" (reuses the selected set of the full layer before it)
    records: RecordFormat
    keys: KeyFormat
    threshold: ThresholdPolicy
    eviction: EvictionPolicy
    seats: int  # B
    capacity: int  # P, positions a request can hold
    host_rows: int  # N_H
    device_slots: int  # N_G, of each layer
    top_k: int  # K
    tokens_per_step: int = 1  # T
    staging: int = 64  # S, staged records of a seat in one layer-step
    prefetch_per_position: float = NO_CAP  # c: a seat's cap is min(S, floor(c * context))
    read_ahead: bool = False  # what shared layers miss is copied once their list is known, beside the rest
    offload: bool = True  # False: the resident run, everything on the device
    host_memory: str = "auto"  # "ffi", "jnp", or the best there is
    slot_manager: str = "auto"  # the same: who keeps the slot maps
    score_implementation: str = "auto"  # "reference", "mosaic_gpu", or the best there is: the index scores of a step
    top_k_implementation: str = "auto"  # as host_memory: the selection
    encode_implementation: str = "auto"  # the same: a step's keys, records and index queries in their stored forms
    # "separate": after the scores. "second_stream": then, but beside the selection, on a stream of its own, as are rows
    # read ahead. "fused": while scores are made, in one kernel. "auto" takes that where it is one for this GPU, if
    # there are positions enough to hide a copy behind, and copies nothing ahead there if there are not.
    prefetch_implementation: str = "auto"
    attend_implementation: str = "reference"  # or "mosaic_gpu", whose products round the query to bf16
    chunk: int = 512  # prompt tokens of one prefill call
    block: int = 64  # of which so many are projected, scored and attended together; results depend on it, not on chunk
    warm_windows: int = 0  # queries at a prompt's end whose selected rows are recalled before decoding starts

    def __post_init__(self):
        self._check_policies()
        self._check_sizes()
        if self.offload:
            self._check_pool()

    def _check_policies(self):
        checks.policy("threshold", self.threshold, ("init", "update", "value"), "Ema(0.5)")
        checks.policy("eviction", self.eviction, ("touch", "rebase"), "Lru()")

    def _check_sizes(self):
        for name in (
            *("seats", "capacity", "host_rows", "device_slots", "top_k", "tokens_per_step"),
            *("staging", "chunk", "block", "warm_windows"),
        ):
            checks.whole(
                name, getattr(self, name), most=2**62
            )  # what does not fit a memory is said elsewhere, in bytes
        if not isinstance(self.prefetch_per_position, int | float) or isinstance(self.prefetch_per_position, bool):
            raise ValueError(
                f"prefetch_per_position is {self.prefetch_per_position!r} but must be a number, the rows that a seat "
                "may prefetch for each position of its context"
            )
        for name in ("seats", "capacity", "host_rows", "device_slots", "top_k", "tokens_per_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)} but must be at least 1")
        for name in ("capacity", "host_rows"):
            if getattr(self, name) % PAGE:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, not a multiple of the page size {PAGE}; round it up to "
                    f"{-(-getattr(self, name) // PAGE) * PAGE}"
                )
        if not self.layer_kinds or self.layer_kinds[0] != "full" or set(self.layer_kinds) - {"full", "shared"}:
            raise ValueError(
                f"layer kinds {self.layer_kinds} must be 'full' or 'shared' and start with 'full', whose selected set "
                "the shared ones reuse"
            )
        if self.staging < 0 or not self.prefetch_per_position >= 0:
            raise ValueError(
                f"staging {self.staging} and prefetch_per_position {self.prefetch_per_position} must not be negative; "
                "0 switches prefetch off"
            )
        if self.block < PAGE or self.chunk < self.block or self.chunk % self.block:
            raise ValueError(
                f"chunk is {self.chunk} and block is {self.block}, but block must be at least {PAGE} and chunk a "
                "multiple of it"
            )
        if not 0 <= self.warm_windows <= self.chunk:
            raise ValueError(f"warm_windows is {self.warm_windows} but must lie in 0..{self.chunk}, the chunk")
        for name in ("host_memory", "slot_manager", "top_k_implementation", "encode_implementation"):
            if getattr(self, name) not in _ffi.IMPLEMENTATIONS:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(_ffi.IMPLEMENTATIONS)}"
                )
        for name, known in (
            ("score_implementation", ("auto", "reference", "mosaic_gpu")),
            ("prefetch_implementation", ("auto", "separate", "second_stream", "fused")),
            ("attend_implementation", ("reference", "mosaic_gpu")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is unknown; use one of {', '.join(known)}")

    def check_step(self, tokens: int):
        """Refuses a step of `tokens` new tokens per seat whose rows the device pool could not hold together."""
        checks.whole("tokens per seat", tokens, least=1)
        needed = self.seats * tokens * (self.top_k + 1)
        if self.offload and self.device_slots < needed:
            raise ValueError(
                f"device pool holds {self.device_slots} rows but B*T*(K+1) = {self.seats}*{tokens}*"
                f"({self.top_k}+1) needs {needed}; raise device_slots or lower the batch or the tokens per step"
            )

    def _check_pool(self):
        self.check_step(self.tokens_per_step)
        if self.device_slots < self.warm_windows * self.top_k:
            raise ValueError(
                f"device pool holds {self.device_slots} rows but warming {self.warm_windows} windows of {self.top_k} "
                f"selected rows may need {self.warm_windows * self.top_k}; raise device_slots or lower warm_windows"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def sharers_of(self, layer: int) -> range:
        """The layers that reuse the selected set of `layer`; none of a shared layer's."""
        end = layer + 1
        while end < self.num_layers and self.layer_kinds[end] == "shared":
            end += 1
        return range(layer + 1, end if self.layer_kinds[layer] == "full" else layer + 1)

    @property
    def pages(self) -> int:
        """Host pages, N_H / PAGE."""
        return self.host_rows // PAGE

    @property
    def pages_per_seat(self) -> int:
        return self.capacity // PAGE

    @property
    def pool_rows(self) -> int:
        """Records one layer keeps on the device: N_G, or N_H in the resident run."""
        return self.device_slots if self.offload else self.host_rows

    def device_bytes(self) -> dict[str, int]:
        """Device bytes by kind: L * [N_G * (record + 9) + N_H * (index key + 4)], the keys in full layers only."""
        layers, full = self.num_layers, self.layer_kinds.count("full")
        return {
            "records": layers * self.pool_rows * self.records.bytes_per_row,
            "index keys": full * self.host_rows * self.keys.bytes_per_key,
            "metadata": layers * (4 * self.host_rows + 9 * self.device_slots) if self.offload else 0,
        }

    def host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self.num_layers * self.host_rows * self.records.bytes_per_row if self.offload else 0

    def cap(self, context: int) -> int:
        """Most rows a seat with `context` positions may stage in one layer-step: min(S, floor(c * context))."""
        if context == 0:
            return 0  # and not 0 * inf
        return int(min(self.staging, self.prefetch_per_position * context))

    def bytes_per_position(self) -> int:
        """Device bytes that every position costs whether or not its records are resident: keys and their map."""
        return self.layer_kinds.count("full") * self.keys.bytes_per_key + 4 * self.num_layers
