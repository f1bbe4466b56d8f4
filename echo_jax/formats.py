"""Stored formats: the bytes of a record, and the bytes of an index key.

Every reader, prefill included, reads what is stored here, never the value it was made from; otherwise the size of a
prefill chunk would change results. Knows bytes and rounding. Knows nothing of slots, pages' owners or layers.

FP8 is e4m3 without infinities: 448 is the largest value, rounding is to nearest even, saturating.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from echo_jax import _ffi
from echo_jax.types import PAGE

E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4  # keeps a scale of an all-zero block finite
RECORD_BLOCK = 128  # latent values that share a scale
LANES = 192  # a record of 576 is stored (3, 192): TMA moves at most 256 elements of one dimension


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """The stored form of one token's MLA record in one layer: `latent` values, then `rope` values.

    name     shape           bytes for 512 + 64
    f32      (3, 192) f32    2304
    bf16     (3, 192) bf16   1152
    fp8      (164,)   u32     656: e4m3 codes, one f32 scale per 128 values, then bf16 rope values, little-endian
    """

    name: str
    latent: int
    rope: int

    def __post_init__(self):
        if self.name not in ("f32", "bf16", "fp8"):
            raise ValueError(f"record format {self.name!r} is unknown; use 'f32', 'bf16' or 'fp8'")
        if self.name == "fp8" and (self.latent % RECORD_BLOCK or self.rope % 2):
            raise ValueError(
                f"fp8 records need a latent width divisible by {RECORD_BLOCK} and an even rope width, got "
                f"{self.latent} and {self.rope}; use record format 'bf16'"
            )

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def shape(self) -> tuple[int, ...]:
        if self.name == "fp8":
            return (self.bytes_per_row // 4,)
        return (self.width // LANES, LANES) if self.width % LANES == 0 else (1, self.width)

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype({"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint32}[self.name])

    @property
    def bytes_per_row(self) -> int:
        if self.name == "fp8":
            return self.latent + 4 * (self.latent // RECORD_BLOCK) + 2 * self.rope
        return self.width * self.dtype.itemsize

    def encode(self, values: jax.Array) -> jax.Array:
        """f32[..., width] -> [..., *shape]."""
        lead = values.shape[:-1]
        if self.name != "fp8":
            return values.astype(self.dtype).reshape(*lead, *self.shape)
        latent = values[..., : self.latent].reshape(*lead, -1, RECORD_BLOCK)
        amax = jnp.max(jnp.abs(latent), axis=-1)
        scales = _over_largest_code(amax)
        codes = to_e4m3(_quotient(latent, scales[..., None])).reshape(*lead, -1)
        rope = lax.bitcast_convert_type(values[..., self.latent :].astype(jnp.bfloat16), jnp.uint16)
        return jnp.concatenate([_words(codes), lax.bitcast_convert_type(scales, jnp.uint32), _words(rope)], axis=-1)

    def decode(self, stored: jax.Array) -> jax.Array:
        """[..., *shape] -> f32[..., width]."""
        lead = stored.shape[: stored.ndim - len(self.shape)]
        if self.name != "fp8":
            return stored.reshape(*lead, self.width).astype(jnp.float32)
        words, blocks = self.latent // 4, self.latent // RECORD_BLOCK
        codes = lax.bitcast_convert_type(stored[..., :words], jnp.uint8).reshape(*lead, blocks, RECORD_BLOCK)
        scales = lax.bitcast_convert_type(stored[..., words : words + blocks], jnp.float32)
        latent = from_e4m3(codes) * scales[..., None]
        halves = lax.bitcast_convert_type(stored[..., words + blocks :], jnp.uint16).reshape(*lead, self.rope)
        rope = lax.bitcast_convert_type(halves, jnp.bfloat16).astype(jnp.float32)
        return jnp.concatenate([latent.reshape(*lead, self.latent), rope], axis=-1)


@dataclasses.dataclass(frozen=True)
class KeyFormat:
    """The stored form of index keys: pages of 64, always resident on the device, addressed by host row.

    name     one page                          bytes a key of 128
    f32      (64, width) f32                   512
    bf16     (64, width) bf16                  256
    fp8      (64 * (width + 4),) u8            132: 64 x width e4m3 codes, then 64 f32 scales, powers of two
    """

    name: str
    width: int
    rotated: bool = False  # a Hadamard rotation of query and key before storing; leaves exact scores unchanged

    def __post_init__(self):
        if self.name not in ("f32", "bf16", "fp8"):
            raise ValueError(f"index key format {self.name!r} is unknown; use 'f32', 'bf16' or 'fp8'")
        if self.rotated and self.width & (self.width - 1):
            raise ValueError(f"the Hadamard rotation needs a power of two, the index key has {self.width} values")

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (PAGE * (self.width + 4),) if self.name == "fp8" else (PAGE, self.width)

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype({"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.uint8}[self.name])

    def encode_query(self, query: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`prepare_query`, the query in the type that the scorer reads: exact, as its values are of that type."""
        query, weights = self.prepare_query(query, weights)
        return query.astype(self.query_dtype), weights

    @property
    def query_dtype(self) -> np.dtype:
        """Of the index query as the scorer reads it."""
        return jnp.dtype(jnp.float8_e4m3fn) if self.name == "fp8" else self.dtype

    @property
    def bytes_per_key(self) -> int:
        return self.width + 4 if self.name == "fp8" else self.width * self.dtype.itemsize

    def append(self, pool: jax.Array, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """Writes keys f32[M, width] at host rows i32[M]; rows outside the pool (NO_ROW) are dropped."""
        keys = hadamard(keys) if self.rotated else keys
        page = jnp.where(rows < 0, pool.shape[0], rows // PAGE)  # one past the end: dropped
        offset = rows % PAGE
        if self.name != "fp8":
            return pool.at[page, offset].set(keys.astype(self.dtype), mode="drop")
        codes, scales = quantise_key(keys)
        # Both by one scatter: on a GPU it is a kernel that the scorer waits for.
        key_bytes = jnp.concatenate([codes, _bytes(scales)], axis=1)
        at_code = offset[:, None] * self.width + jnp.arange(self.width)[None]
        at_scale = PAGE * self.width + offset[:, None] * 4 + jnp.arange(4)[None]
        at = jnp.concatenate([at_code, at_scale], axis=1)
        return pool.at[page[:, None], at].set(key_bytes, mode="drop")

    def read_pages(self, pool: jax.Array, pages: jax.Array) -> jax.Array:
        """i32[N] page numbers -> f32[N * PAGE, width]; a missing page reads page 0, to be masked by length."""
        stored = pool.at[jnp.maximum(pages, 0)].get(mode="clip")
        if self.name != "fp8":
            return stored.reshape(-1, self.width).astype(jnp.float32)
        codes = from_e4m3(stored[:, : PAGE * self.width]).reshape(-1, PAGE, self.width)
        scales = lax.bitcast_convert_type(stored[:, PAGE * self.width :].reshape(-1, PAGE, 4), jnp.float32)
        return (codes * scales[..., None]).reshape(-1, self.width)

    def prepare_query(self, query: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """query f32[..., G, width], weights f32[..., G] -> the pair as the scorer reads it, both f32.

        FP8: the query is quantised per head like a key, and its scale moves into the head's weight.
        """
        query = hadamard(query) if self.rotated else query
        if self.name != "fp8":
            return query.astype(self.dtype).astype(jnp.float32), weights
        codes, scales = quantise_key(query)
        return from_e4m3(codes), weights * scales


class Encoded(NamedTuple):
    """What a step stores of its new tokens in one layer, and asks the layer's keys with."""

    index_keys: jax.Array  # the pool of pages, with the new keys in it
    records: jax.Array  # [M, *record shape]
    query: jax.Array  # [N, G, width]  e4m3 values, bf16 or f32, as the keys are
    weights: jax.Array  # f32[N, G]


def encode_step(
    records: RecordFormat,
    keys: KeyFormat,
    index_keys: jax.Array,
    rows: jax.Array,
    index_key: jax.Array,
    record: jax.Array,
    query: jax.Array,
    weights: jax.Array,
    implementation: str = "auto",
) -> Encoded:
    """`RecordFormat.encode`, `KeyFormat.append` and `KeyFormat.encode_query` of a step; by the library, one kernel on a
    GPU (but for the rotation of rotated keys, which is XLA's).

    index_key f32[M, width] goes to host rows i32[M], record is f32[M, record width], query f32[N, G, width] and weights
    f32[N, G]. A negative row is dropped. One beyond the pool is refused by the library on a CPU, and dropped otherwise.

    implementation: "auto" (the library where it serves), "ffi", "cuda" or "jnp". On a CPU all give the same bits, but
    those of a NaN. On a GPU the library's quotients are rounded as on a CPU, while XLA's need not be: a code may be the
    next one there, and a key's scale the next power of two. Prefill and layers without an index of their own store by
    jnp; each row is stored once, and alike in a resident and in an offloaded run.
    """
    if record.shape[-1] != records.width:
        raise ValueError(
            f"a record has {record.shape[-1]} values but its format has {records.latent} + {records.rope}; project to "
            f"{records.width}, or state the model's widths in the RecordFormat"
        )
    if not encodes_by_library(records, keys, implementation):
        pool = keys.append(index_keys, rows, index_key)
        return Encoded(pool, records.encode(record), *keys.encode_query(query, weights))
    if keys.rotated:
        index_key, query = hadamard(index_key), hadamard(query)
    stored = jax.ShapeDtypeStruct((*record.shape[:-1], *records.shape), records.dtype)
    operands = (index_keys, rows, index_key, record, query, weights)
    return Encoded(*_ffi.encode(*operands, latent=records.latent, stored=stored, codes=keys.query_dtype))


def encodes_by_library(records: RecordFormat, keys: KeyFormat, implementation: str = "auto") -> bool:
    """Whether `encode_step` takes the library; RuntimeError where it is asked for by name and cannot serve."""
    unfit = None
    if any(width % 4 for width in (keys.width, records.latent, records.rope)):
        unfit = (
            f"index keys of {keys.width} values and records of {records.latent} + {records.rope} must all be multiples "
            "of 4; use 'jnp'"
        )
    return _ffi.serves("encode implementation", implementation, unfit=unfit)


def quantise_key(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32[..., width] -> e4m3 codes u8[..., width] and scales f32[...], 2^ceil(log2(max(amax, 1e-4) / 448)).

    The exponent is read from the float's bits, so it is exact where log2 would round. An infinite or NaN amax is its
    own scale.
    """
    wanted = _over_largest_code(jnp.max(jnp.abs(values), axis=-1))
    bits = lax.bitcast_convert_type(wanted, jnp.uint32)
    is_fraction = (bits & jnp.uint32(0x7FFFFF)) != 0
    exponent = (bits >> 23) + is_fraction.astype(jnp.uint32)
    scales = jnp.where(jnp.isfinite(wanted), lax.bitcast_convert_type(exponent << 23, jnp.float32), wanted)
    return to_e4m3(_quotient(values, scales[..., None])), scales


def _over_largest_code(amax: jax.Array) -> jax.Array:
    """max(amax, 1e-4) / 448."""
    return _quotient(jnp.maximum(amax, SMALLEST_AMAX), jnp.float32(E4M3_MAX))


def _quotient(values: jax.Array, divisor: jax.Array) -> jax.Array:
    """values / divisor, rounded once.

    XLA multiplies by a rounded reciprocal where it sees that one number divides an array (a barrier does not hide it);
    eager and jitted code, one record and many, or another implementation of the format would then store other bytes.
    It does not see through this select, which changes nothing: a NaN divided is a NaN.
    """
    return values / jnp.where(jnp.isnan(values), values, divisor)


def to_e4m3(values: jax.Array) -> jax.Array:
    """f32 -> u8 e4m3 codes, nearest even, saturating at 448; NaN keeps its sign and becomes 0x7F or 0xFF.

    Integer arithmetic on the float's bits: XLA's own conversion may round twice, through f16.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign, magnitude = (bits >> 24) & 0x80, bits & jnp.uint32(0x7FFFFFFF)
    clipped = jnp.minimum(magnitude, jnp.uint32(0x43E00000))  # 448.0
    # Normal results (from 2^-6): drop 20 mantissa bits with nearest-even, then lower the exponent bias by 120.
    rounded = (clipped + 0x7FFFF + ((clipped >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)  # wraps round below 2^-6, where it is not used
    # Subnormal results are multiples of 2^-9; adding 2^14 lets the f32 adder round to them, ties to even.
    small = lax.bitcast_convert_type(clipped, jnp.float32) + jnp.float32(2.0**14)
    subnormal = lax.bitcast_convert_type(small, jnp.uint32) & jnp.uint32(0xF)
    code = jnp.where(clipped < 0x3C800000, subnormal, normal)  # 2^-6
    code = jnp.where(magnitude > 0x7F800000, jnp.uint32(0x7F), code)
    return (code | sign).astype(jnp.uint8)


def _words(parts: jax.Array) -> jax.Array:
    """u8 or u16 [..., n] -> u32, of as many neighbours each, little-endian.

    As a bitcast would, but by shifts: those XLA fuses with what makes the parts and with what reads the words.
    """
    bits = 8 * parts.dtype.itemsize
    together = parts.reshape(*parts.shape[:-1], -1, 32 // bits).astype(jnp.uint32)
    word = together[..., 0]
    for index in range(1, together.shape[-1]):
        word = word | (together[..., index] << (bits * index))
    return word


def _bytes(values: jax.Array) -> jax.Array:
    """f32[...] -> u8[..., 4], little-endian; by shifts, as `_words`."""
    word = lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.stack([word >> (8 * index) for index in range(4)], axis=-1).astype(jnp.uint8)


def from_e4m3(codes: jax.Array) -> jax.Array:
    """u8 e4m3 codes -> f32, exact."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def hadamard(values: jax.Array) -> jax.Array:
    """The orthonormal Walsh-Hadamard transform of the last axis (a power of two), scale width^-0.5."""
    width = values.shape[-1]
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotation = jnp.asarray(matrix * np.float32(width**-0.5))
    return jnp.einsum("...i,ij->...j", values, rotation, precision=lax.Precision.HIGHEST)
