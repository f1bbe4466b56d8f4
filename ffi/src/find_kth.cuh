// The k-th largest of many order keys, found by a block of threads (or by a cluster of them, each counting its own
// part). Knows integers; not where they come from.
#ifndef ECHO_FFI_FIND_KTH_CUH_
#define ECHO_FFI_FIND_KTH_CUH_

#include <cstdint>

#include "cluster.cuh"

namespace echo_ffi::top_k {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kBinBits = 11;
constexpr uint32_t kBins = 1u << kBinBits;
static_assert(kWarps == kLanes, "one lane adds up one warp");
static_assert(kBins == 2 * kThreads, "a thread looks at two bins");

// Keys in [low + 1, low + 1 + span], in bins of 2^shift keys each.
struct KeyRange {
  uint32_t low;
  uint32_t span;

  __device__ uint32_t Shift() const {
    const uint32_t bits = kLanes - __clz(span);
    return bits > kBinBits ? bits - kBinBits : 0;
  }
  // Keys below the range wrap around to above its span.
  __device__ bool Has(uint32_t key) const { return key - low - 1 <= span; }
  __device__ uint32_t Bin(uint32_t key, uint32_t shift) const { return (key - low - 1) >> shift; }
};

struct Kth {
  uint32_t key;   // the k-th largest
  uint32_t ties;  // how many that equal it are among the k largest
};

// A thread's two bins; thread 0 holds the uppermost.
struct TwoBins {
  uint32_t upper;
  uint32_t lower;
};

struct Scratch {
  uint32_t histogram[kBins];  // all zero between two searches, unless who gathers keys counts them for the next
  unsigned long long warp_sums[kWarps];
  uint32_t bin;
  uint32_t rank;
  uint32_t left;       // keys in that bin
  uint32_t few_count;  // of them listed so far
  uint32_t few[kLanes];

  // Once, before the block meets for the first time.
  __device__ void ClearHistogram() {
    for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = 0;
  }

  // This thread's bins, which it leaves empty: nobody else looks at them.
  __device__ TwoBins TakeBins() {
    const uint32_t upper = kBins - 1 - 2 * threadIdx.x;
    const TwoBins bins = {histogram[upper], histogram[upper - 1]};
    histogram[upper] = histogram[upper - 1] = 0;
    return bins;
  }
};

// What the threads before this one have, and in *total what all have. Between two calls the block must meet once more.
template <typename T>
__device__ T ExclusiveScan(Scratch& scratch, T value, T* total) {
  const uint32_t lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const auto inclusive_in_warp = [lane](T sum) {
#pragma unroll
    for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
      const T before = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += before;
    }
    return sum;
  };
  const T in_warp = inclusive_in_warp(value);
  if (lane == kLanes - 1) scratch.warp_sums[warp] = in_warp;
  __syncthreads();
  const T warps = inclusive_in_warp(static_cast<T>(scratch.warp_sums[lane]));
  *total = __shfl_sync(kAllLanes, warps, kLanes - 1);
  const T before = __shfl_sync(kAllLanes, warps, warp == 0 ? 0 : warp - 1);
  return (warp == 0 ? 0 : before) + in_warp - value;
}

// The rank-th largest of the scratch's few keys. Each warp finds it for itself.
__device__ inline Kth RankFew(const Scratch& scratch, uint32_t count, uint32_t rank) {
  const uint32_t lane = threadIdx.x % kLanes;
  const uint32_t mine = lane < count ? scratch.few[lane] : 0;
  uint32_t above = 0, equal = 0;
  for (uint32_t other = 0; other < count; ++other) {
    const uint32_t key = __shfl_sync(kAllLanes, mine, other);
    above += key > mine;
    equal += key == mine;
  }
  const bool is_kth = lane < count && above < rank && rank <= above + equal;
  const uint32_t found = __ffs(__ballot_sync(kAllLanes, is_kth)) - 1;
  return {__shfl_sync(kAllLanes, mine, found), rank - __shfl_sync(kAllLanes, above, found)};
}

// The rank-th largest (from 1) of the keys in `range`, of which there must be as many. Called by all threads:
// keys.Count(range, shift) -> TwoBins counts the keys in the range by bin, keys.ListFew(range) lists them in the
// scratch where keys.kListsFew. Each round spreads what is left over all bins, so that scores of a few exponents, as
// index scores are, do not meet in a few counters; and when no more is left than a warp has lanes, a warp compares
// them.
template <typename Keys>
__device__ Kth FindKth(Scratch& scratch, KeyRange range, uint32_t rank, Keys keys) {
  for (;;) {
    const uint32_t shift = range.Shift();
    const TwoBins bins = keys.Count(range, shift);
    uint32_t all;
    const uint32_t before = ExclusiveScan<uint32_t>(scratch, bins.upper + bins.lower, &all);
    const uint32_t upper = kBins - 1 - 2 * threadIdx.x;
    if (before < rank && rank <= before + bins.upper + bins.lower) {
      const bool is_upper = rank <= before + bins.upper;
      scratch.bin = is_upper ? upper : upper - 1;
      scratch.rank = is_upper ? rank - before : rank - before - bins.upper;
      scratch.left = is_upper ? bins.upper : bins.lower;
      scratch.few_count = 0;
    }
    __syncthreads();
    rank = scratch.rank;
    const uint32_t skipped = scratch.bin << shift, left = scratch.left;
    // The uppermost bin may reach over the end of the range, behind which there may be keys, too.
    range = {range.low + skipped, min((1u << shift) - 1, range.span - skipped)};
    if (shift == 0) return {range.low + 1, rank};
    if constexpr (Keys::kListsFew) {
      if (left > kLanes) continue;
      keys.ListFew(range);
      __syncthreads();
      return RankFew(scratch, left, rank);
    }
  }
}

// Keys of a list in shared memory.
struct ListedKeys {
  static constexpr bool kListsFew = true;

  Scratch& scratch;
  const uint32_t* keys;
  uint32_t length;
  bool are_counted = false;  // the first range's keys are in the histogram already: whoever gathered them counted them

  __device__ TwoBins Count(KeyRange range, uint32_t shift) {
    if (!are_counted) {
      for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
        const uint32_t key = keys[i];
        if (range.Has(key)) atomicAdd(&scratch.histogram[range.Bin(key, shift)], 1u);
      }
    }
    are_counted = false;
    __syncthreads();
    return scratch.TakeBins();
  }

  __device__ void ListFew(KeyRange range) const {
    for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
      const uint32_t key = keys[i];
      if (range.Has(key)) scratch.few[atomicAdd(&scratch.few_count, 1u)] = key;
    }
  }
};

}  // namespace echo_ffi::top_k

#endif  // ECHO_FFI_FIND_KTH_CUH_
