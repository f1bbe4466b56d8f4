"""The options that size a cache, shared by the commands that make one and the ones that only plan it.

Knows how options become a `DecodeConfig`. Does not know where a model comes from.
"""

from __future__ import annotations

import dataclasses

from echo_jax import eviction, hostmem, threshold
from echo_jax.cli.errors import InputError
from echo_jax.cli.options import option
from echo_jax.cli.policies import SYNTAX, parse_eviction, parse_threshold
from echo_jax.config import NO_CAP
from echo_jax.decode import DecodeConfig, cache_config
from echo_jax.models.config import DsaConfig
from echo_jax.types import PAGE

FORMATS = ("bf16", "f32", "fp8")
CHUNK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """Sizes, formats and policies of a cache."""

    device_slots: int | None = option(
        "records that each layer keeps on the device (default: 4 top_k per request)", None, metavar="N", group="cache"
    )
    host_rows: int | None = option(
        "rows of the host pool, one per token (default: every request can be full)", None, metavar="N", group="cache"
    )
    record_format: str = option("stored form of a record", "bf16", choices=FORMATS, group="cache")
    key_format: str = option("stored form of an index key", "f32", choices=FORMATS, group="cache")
    rotate_index_keys: bool = option("Hadamard rotation of index queries and keys before storing", False, group="cache")
    chunk: int | None = option(
        f"prompt tokens of one prefill call, a multiple of {PAGE} (default: {CHUNK}, less for short prompts)",
        None,
        metavar="N",
        group="cache",
    )
    warm_windows: int = option(
        "queries at a prompt's end whose selected rows become resident before decoding", 0, metavar="N", group="cache"
    )
    threshold: str = option(
        f"predicts the k-th score, and so what is copied ahead: {', '.join(threshold.POLICIES)}. {SYNTAX}",
        "ema",
        metavar="POLICY",
        group="prefetch and eviction",
    )
    cap: int = option(
        "most rows copied ahead per request and layer-step; 0 switches it off",
        64,
        metavar="S",
        group="prefetch and eviction",
    )
    prefetch_per_position: float = option(
        "with c, the cap is min(S, c * context)", NO_CAP, metavar="c", group="prefetch and eviction"
    )
    eviction: str = option(
        f"who loses its slot: {', '.join(eviction.POLICIES)}. Written as for --threshold",
        "lru",
        metavar="POLICY",
        group="prefetch and eviction",
    )

    read_ahead: bool = option(
        "copy what layers that share a selected set miss as soon as the set is known, beside all that comes between",
        False,
        group="prefetch and eviction",
    )
    slot_manager: str = option(
        "who keeps the slot maps: the shared library, jnp, or the best there is",
        "auto",
        choices=hostmem.IMPLEMENTATIONS,
        group="implementations",
    )
    top_k: str = option(
        "who selects exactly: the shared library, jnp, or the best there is",
        "auto",
        choices=hostmem.IMPLEMENTATIONS,
        group="implementations",
    )
    encode: str = option(
        "who brings a step's keys and records into their stored forms: the shared library, jnp, or the best there is",
        "auto",
        choices=hostmem.IMPLEMENTATIONS,
        group="implementations",
    )
    scores: str = option(
        "who scores positions in a decode step: plain jnp, the Mosaic GPU kernel, or the best there is",
        "auto",
        choices=("auto", "reference", "mosaic_gpu"),
        group="implementations",
    )

    prefetch: str = option(
        "rows are copied ahead after the scores are made (separate), then but beside the selection (second_stream), or "
        "by the scoring kernel itself (fused)",
        "auto",
        choices=("auto", "separate", "second_stream", "fused"),
        group="implementations",
    )
    attend: str = option(
        "who attends in a decode step: plain jnp, or the Mosaic GPU kernel, which rounds queries to bf16",
        "reference",
        choices=("reference", "mosaic_gpu"),
        group="implementations",
    )

    def decode_config(
        self,
        model: DsaConfig,
        *,
        seats: int,
        capacity: int,
        host_memory: str = "auto",
        longest: int | None = None,
        tokens_per_step: int = 1,
    ) -> DecodeConfig:
        """The checked configuration; capacity is rounded up to pages. ValueError, InputError for what does not fit."""
        if capacity > model.max_positions:
            raise InputError(
                f"capacity is {capacity} but the model knows {model.max_positions} positions; lower it, or shorten the "
                "prompt"
            )
        chunk = self.chunk
        if chunk is None:
            chunk = min(CHUNK, whole_pages(longest or capacity))
        cache = cache_config(
            model,
            seats=seats,
            capacity=capacity,
            host_rows=self.host_rows,
            device_slots=self.device_slots,
            record_format=self.record_format,
            key_format=self.key_format,
            rotate_index_keys=self.rotate_index_keys,
            threshold=parse_threshold(self.threshold),
            eviction=parse_eviction(self.eviction),
            staging=self.cap,
            prefetch_per_position=self.prefetch_per_position,
            host_memory=host_memory,
            chunk=chunk,
            tokens_per_step=tokens_per_step,
            warm_windows=self.warm_windows,
            read_ahead=self.read_ahead,
            slot_manager=self.slot_manager,
            top_k_implementation=self.top_k,
            encode_implementation=self.encode,
            score_implementation=self.scores,
            prefetch_implementation=self.prefetch,
            attend_implementation=self.attend,
        )
        # Positions beyond the model's last are only padding of the last page.
        return DecodeConfig(dataclasses.replace(model, max_positions=whole_pages(model.max_positions)), cache)


def whole_pages(rows: int) -> int:
    """Rounded up to pages."""
    return -(-rows // PAGE) * PAGE
