"""Oracle of the stored formats: which bits a record, an index key and a quantised index query become.

Knows bits and rounding rules, written out in integer arithmetic and by search. Knows nothing of where the
bytes live, and uses no library type but float32: a bf16 value is its 16 bits, an e4m3fn value its code.

A scale is computed in float32 and a value is divided by it in float32 (one rounding each) before it is
rounded to a code; bytes depend on this, so it is part of the format.
"""

import math

import numpy as np

from tests.oracles.words import PAGE

LARGEST_CODE_VALUE = 448.0
SMALLEST_AMAX = np.float32(1e-4)
VALUES_PER_SCALE = 128

# bf16


def to_bf16(values: np.ndarray) -> np.ndarray:
    """u16, same shape: the nearest bf16 bits of float32 values, ties to the even ones. A NaN stays a NaN."""
    values = _float32(values)
    result = np.zeros(values.size, np.uint16)
    for place, bits in enumerate(values.reshape(-1).view(np.uint32)):
        bits = int(bits)
        kept, dropped = bits >> 16, bits & 0xFFFF
        if (bits & 0x7FFFFFFF) > 0x7F800000:
            kept |= 0x0040
        elif dropped > 0x8000 or (dropped == 0x8000 and kept & 1):
            kept += 1  # a carry runs into the exponent and, at the largest value, into infinity
        result[place] = kept
    return result.reshape(values.shape)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """f32, same shape: the values of bf16 bits, exactly."""
    return (np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


# e4m3fn


def _value_of_code(code: int) -> float:
    """Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity; only the two all-ones codes are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


CODE_VALUES = [_value_of_code(code) for code in range(256)]
"""The value of each of the 256 codes."""


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """u8, same shape: the code nearest to each float32 value, among two equally near the even one.

    Beyond 448 the code is that of 448 (saturating, infinities too); NaN becomes 0x7F; a zero keeps its sign.
    """
    values = _float32(values)
    magnitudes = np.array(CODE_VALUES[:0x7F])  # codes 0..0x7E in ascending order of value
    result = np.zeros(values.size, np.uint8)
    for place, value in enumerate(values.reshape(-1)):
        if math.isnan(value):
            result[place] = 0x7F
            continue
        distances = np.abs(magnitudes - min(abs(float(value)), LARGEST_CODE_VALUE))
        nearest = [int(code) for code in np.flatnonzero(distances == distances.min())]
        code = nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]
        result[place] = code | (0x80 if np.signbit(value) else 0)
    return result.reshape(values.shape)


def from_e4m3(codes: np.ndarray) -> np.ndarray:
    """f32, same shape: the values of codes, exactly."""
    return np.array(CODE_VALUES, np.float32)[np.asarray(codes)]


# Records


def record_shape(width: int) -> tuple[int, int]:
    """How a record of `width` f32 or bf16 values is shaped: runs of 192 where they fit, else one run."""
    return (width // 192, 192) if width % 192 == 0 else (1, width)


def f32_record(values: np.ndarray) -> np.ndarray:
    """f32[record shape] of float32 values [W]."""
    return _float32(values).reshape(record_shape(len(values)))


def bf16_record(values: np.ndarray) -> np.ndarray:
    """u16[record shape]: the bf16 bits of float32 values [W]."""
    return to_bf16(values).reshape(record_shape(len(values)))


def fp8_record(values: np.ndarray, latent: int) -> np.ndarray:
    """u32[bytes / 4]: the FP8 record of float32 values [latent + rope]; 656 bytes for 512 + 64.

    Bytes, little-endian: `latent` e4m3fn codes; one float32 scale per 128 of them, max(largest magnitude,
    1e-4) / 448; the rope values as bf16. A latent value is about code * scale.
    """
    values = _float32(values)
    if latent % VALUES_PER_SCALE or (len(values) - latent) % 2:
        raise ValueError(f"latent {latent} must be a multiple of 128 and rope {len(values) - latent} even")
    codes, scales = b"", b""
    with np.errstate(invalid="ignore"):
        for start in range(0, latent, VALUES_PER_SCALE):
            block = values[start : start + VALUES_PER_SCALE]
            scale = np.maximum(np.max(np.abs(block)), SMALLEST_AMAX) / np.float32(LARGEST_CODE_VALUE)
            codes += to_e4m3(block / scale).tobytes()
            scales += scale.astype("<f4").tobytes()
    rope = to_bf16(values[latent:]).astype("<u2").tobytes()
    return np.frombuffer(codes + scales + rope, "<u4").astype(np.uint32)


def read_fp8_record(words: np.ndarray, latent: int) -> np.ndarray:
    """f32[latent + rope]: the values an FP8 record stands for, code * scale rounded once to float32."""
    content = np.asarray(words).astype("<u4").tobytes()
    scales = np.frombuffer(content[latent : latent + latent // 32], "<f4").astype(np.float32)
    values = from_e4m3(np.frombuffer(content[:latent], np.uint8))
    with np.errstate(invalid="ignore"):
        for block, scale in enumerate(scales):
            values[block * VALUES_PER_SCALE : (block + 1) * VALUES_PER_SCALE] *= scale
    rope = from_bf16(np.frombuffer(content[latent + latent // 32 :], "<u2"))
    return np.concatenate([values, rope])


# Index keys and index queries


def power_of_two_scale(values: np.ndarray) -> np.float32:
    """2^ceil(log2(max(largest magnitude, 1e-4) / 448)): the smallest power of two not below the quotient.

    Exact, without a logarithm: the quotient of a float32 by 448 is a power of two only if it is exactly one,
    in float64 as in float32. A NaN or infinite magnitude is its own scale.
    """
    amax = float(np.maximum(np.max(np.abs(_float32(values))), SMALLEST_AMAX))
    if not math.isfinite(amax):
        return np.float32(amax)
    # The quotient is mantissa * 2^exponent with 0.5 <= mantissa < 1.
    mantissa, exponent = math.frexp(amax / LARGEST_CODE_VALUE)
    return np.float32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))


def quantise(values: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """u8[D] codes and the power-of-two scale of one index key, or of one head of an index query."""
    scale = power_of_two_scale(values)
    with np.errstate(invalid="ignore"):
        return to_e4m3(_float32(values) / scale), scale


def index_key_page(keys: np.ndarray) -> np.ndarray:
    """u8[64 * D + 256]: a page of index keys f32[64, D]: 64 x D codes, then 64 little-endian f32 scales."""
    if len(keys) != PAGE:
        raise ValueError(f"a page holds {PAGE} index keys, not {len(keys)}; pad it")
    codes, scales = b"", b""
    for key in keys:
        key_codes, scale = quantise(key)
        codes += key_codes.tobytes()
        scales += scale.astype("<f4").tobytes()
    return np.frombuffer(codes + scales, np.uint8).copy()


def read_index_key_page(page: np.ndarray) -> np.ndarray:
    """f32[64, D]: the keys a page stands for, code * scale (exact: the scale is a power of two)."""
    content = np.asarray(page, np.uint8).tobytes()
    width = len(content) // PAGE - 4
    scales = np.frombuffer(content[PAGE * width :], "<f4").astype(np.float32)
    keys = from_e4m3(np.frombuffer(content[: PAGE * width], np.uint8)).reshape(PAGE, width)
    with np.errstate(invalid="ignore"):
        return np.stack([keys[place] * scales[place] for place in range(PAGE)])


def quantised_index_query(query: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """u8[G, D] codes and f32[G] weights of one query: each head's scale is folded into its weight.

    query: f32[G, D]  weights: f32[G]. With keys read back, the score is the sum over g of
    weight_g * relu(codes_g . key).
    """
    codes, folded = [], []
    for head, weight in zip(query, _float32(weights), strict=True):
        head_codes, scale = quantise(head)
        codes.append(head_codes)
        folded.append(weight * scale)
    return np.stack(codes), np.array(folded, np.float32)


def hadamard(values: np.ndarray) -> np.ndarray:
    """f64[n]: the Hadamard rotation of n values, n a power of two.

    n^-0.5 times the matrix H_n, where H_1 = [1] and H_2n = [[H_n, H_n], [H_n, -H_n]].
    """

    def unscaled(x: list[float]) -> list[float]:
        if len(x) == 1:
            return x
        half = len(x) // 2
        upper, lower = unscaled(x[:half]), unscaled(x[half:])
        sums = [a + b for a, b in zip(upper, lower, strict=True)]
        differences = [a - b for a, b in zip(upper, lower, strict=True)]
        return sums + differences

    n = len(values)
    if n < 1 or n & (n - 1):
        raise ValueError(f"the Hadamard rotation needs a power of two of values, got {n}")
    return np.array(unscaled([float(value) for value in values])) * n**-0.5


def _float32(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype != np.float32:
        raise TypeError(f"stored formats round float32 values, got {values.dtype}; round to float32 first")
    return np.ascontiguousarray(values)
