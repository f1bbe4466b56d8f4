// The order of scores as integers: a greater key is a better score. Knows bit patterns; a float comparison would take
// subnormal numbers for zeros wherever a processor or a compiler is told to. Shared by every platform.
#ifndef ECHO_FFI_ORDER_H_
#define ECHO_FFI_ORDER_H_

#include <cstdint>

#ifdef __CUDACC__
#define ECHO_HOST_DEVICE __host__ __device__
#else
#define ECHO_HOST_DEVICE
#endif

namespace echo_ffi {

// Below every number, -inf (0x007fffff) included, and above 0, which no visible score has.
inline constexpr uint32_t kNanKey = 1;
inline constexpr uint32_t kZeroKey = 0x80000000u;
inline constexpr uint32_t kNanBits = 0x7fc00000u;

// The key of a float32 with these bits. All NaNs are one key, and so are both zeros.
ECHO_HOST_DEVICE constexpr uint32_t OrderKey(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t mirrored = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  const uint32_t number = magnitude == 0 ? kZeroKey : mirrored;
  return magnitude > 0x7f800000u ? kNanKey : number;
}

// A bfloat16 is the upper half of a float32; the order is the same.
ECHO_HOST_DEVICE constexpr uint32_t OrderKey(uint16_t bits) { return OrderKey(static_cast<uint32_t>(bits) << 16); }

// The float32 bits of a key: +0 for a zero, the quiet NaN for kNanKey and for 0 (no score).
ECHO_HOST_DEVICE constexpr uint32_t ScoreBits(uint32_t key) {
  return key <= kNanKey ? kNanBits : key & kZeroKey ? key ^ kZeroKey : ~key;
}

// The key of a bound with these float32 bits, or 0, below every key, where it is no finite number and says nothing.
ECHO_HOST_DEVICE constexpr uint32_t BoundKey(uint32_t bits) {
  return (bits & 0x7f800000u) == 0x7f800000u ? 0 : OrderKey(bits);
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_ORDER_H_
