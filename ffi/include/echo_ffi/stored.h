// Values in the form in which they are kept: the bits of echo_jax/formats.py, bit for bit. Knows single values and
// groups of four; knows no record, key or page. Shared by every platform.
//
// Four values are the unit: a word of FP8, two of bfloat16, four of float32.
#ifndef ECHO_FFI_STORED_H_
#define ECHO_FFI_STORED_H_

#include <cstdint>
#include <cstring>

#include "echo_ffi/order.h"

namespace echo_ffi {

enum class Form { kFloat32, kBfloat16, kFp8 };

inline constexpr int kFour = 4;
inline constexpr uint32_t kMagnitude = 0x7fffffffu;
inline constexpr uint32_t kInfinity = 0x7f800000u;

ECHO_HOST_DEVICE inline uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

ECHO_HOST_DEVICE inline float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Bytes of `values` values.
ECHO_HOST_DEVICE constexpr int64_t StoredBytes(Form form, int64_t values) {
  return values * (form == Form::kFp8 ? 1 : form == Form::kBfloat16 ? 2 : 4);
}

// The e4m3 code: nearest even, saturating at 448. A NaN keeps its sign and becomes 0x7f or 0xff.
ECHO_HOST_DEVICE inline uint32_t E4m3(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & kMagnitude;
  if (magnitude > kInfinity) return sign | 0x7fu;
  const uint32_t clipped = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;  // 448
  // Below 2^-6 codes are multiples of 2^-9, to which the sum with 2^14 rounds; above, 20 bits of the mantissa go and the
  // exponent's bias is 120 less.
  if (clipped < 0x3c800000u) return sign | (BitsOf(FloatOf(clipped) + 16384.0f) & 0xfu);
  return sign | (((clipped + 0x7ffffu + (clipped >> 20 & 1u)) >> 20) - (120u << 3));
}

// The upper half of the float, nearest even. A NaN stays one.
ECHO_HOST_DEVICE inline uint32_t Bfloat16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & kMagnitude) > kInfinity) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// What a block of values whose largest magnitude has these bits is divided by before it is rounded: a NaN if one of them
// is, as a NaN has the largest bits.
ECHO_HOST_DEVICE inline float RecordScale(uint32_t largest) {
  constexpr float kSmallest = 1e-4f, kLargestCode = 448.0f;
  const float amax = FloatOf(largest);
  return (amax < kSmallest ? kSmallest : amax) / kLargestCode;
}

// The same for a key: the next power of two, read from the exponent's bits. What is not finite stays as it is.
ECHO_HOST_DEVICE inline float KeyScale(uint32_t largest) {
  const float wanted = RecordScale(largest);
  const uint32_t bits = BitsOf(wanted);
  if (bits >= kInfinity) return wanted;
  return FloatOf(((bits >> 23) + ((bits & 0x7fffffu) != 0)) << 23);
}

struct Four {
  float values[kFour];
};

ECHO_HOST_DEVICE inline uint32_t LargestMagnitude(const Four& four) {
  uint32_t largest = 0;
  for (const float value : four.values) {
    const uint32_t magnitude = BitsOf(value) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Group `index` of what lies at `words`, its values divided by `scale` where the form is FP8.
ECHO_HOST_DEVICE inline void StoreFour(Form form, uint32_t* words, int64_t index, const Four& four, float scale) {
  switch (form) {
    case Form::kFp8: {
      uint32_t word = 0;
      for (int i = 0; i < kFour; ++i) word |= E4m3(four.values[i] / scale) << (8 * i);
      words[index] = word;
      return;
    }
    case Form::kBfloat16:
      words[2 * index] = Bfloat16(four.values[0]) | Bfloat16(four.values[1]) << 16;
      words[2 * index + 1] = Bfloat16(four.values[2]) | Bfloat16(four.values[3]) << 16;
      return;
    case Form::kFloat32:
      for (int i = 0; i < kFour; ++i) words[kFour * index + i] = BitsOf(four.values[i]);
  }
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_STORED_H_
