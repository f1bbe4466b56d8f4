// echo_top_k on a CPU: one thread, a row after the other.
//
// The k-th largest order key is found a digit at a time, from the top: count the keys by digit, walk down to the digit
// that holds the k-th, keep the keys that have it, go on with those. One last pass in order of position then takes what
// is above, and of what is equal the first.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "echo_ffi/order.h"
#include "echo_ffi/top_k.h"

namespace echo_ffi {
namespace {

constexpr int kDigitBits = 11;
constexpr uint32_t kDigits = 1u << kDigitBits;
// The lowest bit of each digit. The last repeats bit 10, in which the keys that are left agree.
constexpr int kShifts[] = {21, 10, 0};

// The k-th largest of keys[0, count), 1 <= k <= count, and how many of its equals are among the k largest. `left` is
// scratch of `count` keys.
struct Kth {
  uint32_t key = 0;
  int64_t ties_taken = 0;
};

Kth FindKth(const uint32_t* keys, int64_t count, int64_t k, uint32_t* left) {
  uint32_t kth = 0;
  for (const int shift : kShifts) {
    // Two counts side by side: equal neighbours, as zeros are, would wait for each other's increment.
    uint32_t counted[2][kDigits] = {};
    const auto digit = [shift](uint32_t key) { return (key >> shift) & (kDigits - 1); };
    int64_t i = 0;
    for (; i + 1 < count; i += 2) {
      ++counted[0][digit(keys[i])];
      ++counted[1][digit(keys[i + 1])];
    }
    if (i < count) ++counted[0][digit(keys[i])];
    uint32_t chosen = kDigits - 1;
    for (;; --chosen) {
      const int64_t here = counted[0][chosen] + counted[1][chosen];
      if (here >= k) break;
      k -= here;
    }
    kth |= chosen << shift;
    int64_t kept = 0;
    for (int64_t j = 0; j < count; ++j) {
      left[kept] = keys[j];
      kept += digit(keys[j]) == chosen;
    }
    keys = left;
    count = kept;
  }
  return {kth, k};
}

template <typename Bits>
void SelectRow(const Bits* score, int64_t visible, int64_t k, uint32_t* keys, uint32_t* left, int32_t* positions,
               float* kth_score) {
  for (int64_t p = 0; p < visible; ++p) keys[p] = OrderKey(score[p]);
  const int64_t wanted = std::min(visible, k);
  Kth kth;
  if (wanted == visible) {
    for (int64_t p = 0; p < wanted; ++p) positions[p] = static_cast<int32_t>(p);
    if (visible > 0) kth.key = *std::min_element(keys, keys + visible);
  } else {
    kth = FindKth(keys, visible, k, left);
    int64_t taken = 0;
    for (int64_t p = 0; taken < wanted; ++p) {  // wanted of them are above or taken ties, so it ends before `visible`
      const bool is_tie = keys[p] == kth.key && kth.ties_taken > 0;
      positions[taken] = static_cast<int32_t>(p);
      taken += keys[p] > kth.key || is_tie;
      kth.ties_taken -= is_tie;
    }
  }
  std::fill(positions + wanted, positions + k, -1);
  const uint32_t bits = ScoreBits(kth.key);
  std::memcpy(kth_score, &bits, sizeof bits);
}

ffi::Error TopK(ffi::AnyBuffer score, ffi::Buffer<ffi::S32> visible, ffi::Result<ffi::Buffer<ffi::S32>> positions,
                ffi::Result<ffi::Buffer<ffi::F32>> kth_score, int64_t k) {
  TopKViews views;
  ECHO_RETURN_IF_ERROR(ViewTopK("echo_top_k", score, visible, k, positions, kth_score, &views));
  const std::unique_ptr<uint32_t[]> keys(new uint32_t[2 * views.length]);
  uint32_t* const left = keys.get() + views.length;
  const auto select_rows = [&](auto* scores) {
    for (int64_t n = 0; n < views.rows; ++n) {
      const int64_t seen = std::clamp<int64_t>(views.visible[n], 0, views.length);
      SelectRow(scores + n * views.length, seen, k, keys.get(), left, views.positions + n * k, views.kth_score + n);
    }
  };
  if (views.is_bf16) {
    select_rows(static_cast<const uint16_t*>(views.score));
  } else {
    select_rows(static_cast<const uint32_t*>(views.score));
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoTopKCpu, TopK,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()            // score
                                  .Arg<ffi::Buffer<ffi::S32>>()     // visible
                                  .Ret<ffi::Buffer<ffi::S32>>()     // positions
                                  .Ret<ffi::Buffer<ffi::F32>>()     // kth_score
                                  .Attr<int64_t>("k"));

}  // namespace echo_ffi
