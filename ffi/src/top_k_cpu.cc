// echo_top_k and echo_bounded_top_k on a CPU: one thread, a row after the other.
//
// The k-th largest order key is found a digit at a time, from the top: count the keys by digit, walk down to the digit
// that holds the k-th, keep the keys that have it, go on with those. One last pass in order of position then takes what
// is above, and of what is equal the first. Where a bound, or the caller's marks, leave enough keys, they stand for the
// row.
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

// Keys of a row in order of position, and the positions; nullptr where key p is that of position p.
struct Keys {
  const uint32_t* keys;
  const int32_t* positions;
  int64_t count;
};

void SelectFrom(const Keys& from, int64_t k, uint32_t* left, int32_t* positions, float* kth_score) {
  const auto position = [&](int64_t i) {
    return from.positions == nullptr ? static_cast<int32_t>(i) : from.positions[i];
  };
  const uint32_t* const keys = from.keys;
  const int64_t wanted = std::min(from.count, k);
  Kth kth;
  if (wanted == from.count) {
    for (int64_t i = 0; i < wanted; ++i) positions[i] = position(i);
    if (wanted > 0) kth.key = *std::min_element(keys, keys + wanted);
  } else {
    kth = FindKth(keys, from.count, k, left);
    int64_t taken = 0;
    for (int64_t i = 0; taken < wanted; ++i) {  // wanted of them are above or taken ties, so it ends before `count`
      const bool is_tie = keys[i] == kth.key && kth.ties_taken > 0;
      positions[taken] = position(i);
      taken += keys[i] > kth.key || is_tie;
      kth.ties_taken -= is_tie;
    }
  }
  std::fill(positions + wanted, positions + k, -1);
  const uint32_t bits = ScoreBits(kth.key);
  std::memcpy(kth_score, &bits, sizeof bits);
}

// One row's keys and positions above a bound, looked for at the caller's marks where there are some.
template <typename Bits>
Keys KeysAbove(const Bits* score, int64_t visible, uint32_t bound, const uint32_t* above, uint32_t* keys,
               int32_t* positions) {
  int64_t count = 0;
  for (int64_t p = 0; p < visible; ++p) {
    if (above != nullptr && above[p / 32] == 0) {  // skips the word
      p |= 31;
      continue;
    }
    const uint32_t key = OrderKey(score[p]);
    keys[count] = key;
    positions[count] = static_cast<int32_t>(p);
    count += key > bound && (above == nullptr || (above[p / 32] >> (p % 32) & 1) != 0);
  }
  return {keys, positions, count};
}

template <typename Bits>
void SelectRows(const Bits* scores, const TopKViews& views) {
  const std::unique_ptr<uint32_t[]> keys(new uint32_t[2 * views.length]);
  const std::unique_ptr<int32_t[]> listed(new int32_t[views.length]);
  for (int64_t n = 0; n < views.rows; ++n) {
    const Bits* const score = scores + n * views.length;
    const int64_t visible = std::clamp<int64_t>(views.visible[n], 0, views.length);
    const uint32_t* const above = views.above == nullptr ? nullptr : views.above + n * WordsOfMarks(views.length);
    uint32_t bound = 0;
    if (views.bound != nullptr) {
      std::memcpy(&bound, views.bound + n, sizeof bound);
      bound = BoundKey(bound);
    }
    Keys from = {};
    if (above != nullptr || bound != 0) from = KeysAbove(score, visible, bound, above, keys.get(), listed.get());
    if (from.count < views.k) {
      for (int64_t p = 0; p < visible; ++p) keys[p] = OrderKey(score[p]);
      from = {keys.get(), nullptr, visible};
    }
    SelectFrom(from, views.k, keys.get() + views.length, views.positions + n * views.k, views.kth_score + n);
  }
}

ffi::Error Select(const TopKViews& views) {
  if (views.is_bf16) {
    SelectRows(static_cast<const uint16_t*>(views.score), views);
  } else {
    SelectRows(static_cast<const uint32_t*>(views.score), views);
  }
  return ffi::Error::Success();
}

ffi::Error TopK(ffi::AnyBuffer score, ffi::Buffer<ffi::S32> visible, ffi::Result<ffi::Buffer<ffi::S32>> positions,
                ffi::Result<ffi::Buffer<ffi::F32>> kth_score, int64_t k) {
  TopKViews views;
  ECHO_RETURN_IF_ERROR(ViewTopK(kTopK, score, visible, k, positions, kth_score, &views));
  return Select(views);
}

ffi::Error BoundedTopK(ffi::AnyBuffer score, ffi::Buffer<ffi::S32> visible, ffi::Buffer<ffi::F32> bound,
                       ffi::Buffer<ffi::U32> above, ffi::Result<ffi::Buffer<ffi::S32>> positions,
                       ffi::Result<ffi::Buffer<ffi::F32>> kth_score, int64_t k) {
  TopKViews views;
  ECHO_RETURN_IF_ERROR(ViewTopK(kBoundedTopK, score, visible, k, positions, kth_score, &views));
  ECHO_RETURN_IF_ERROR(ViewBound(kBoundedTopK, bound, above, &views));
  return Select(views);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoTopKCpu, TopK, BindTopK(ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoBoundedTopKCpu, BoundedTopK, BindBoundedTopK(ffi::Ffi::Bind()));

}  // namespace echo_ffi
