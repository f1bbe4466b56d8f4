// The k-th largest of many order keys, found by a block of threads (or by a cluster of them, each counting its own
// part). Knows integers; not where they come from.
#ifndef ECHO_FFI_FIND_KTH_CUH_
#define ECHO_FFI_FIND_KTH_CUH_

#include <cstdint>

#include "cluster.cuh"
#include "row_scores.cuh"

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
  uint32_t histogram[kBins];
  unsigned long long warp_sums[kWarps];
  uint32_t bin;
  uint32_t rank;

  __device__ void ClearHistogram() {
    for (uint32_t bin = threadIdx.x; bin < kBins; bin += kThreads) histogram[bin] = 0;
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

// The rank-th largest (from 1) of the keys in `range`, of which there must be as many. count(range, shift) -> TwoBins
// is called by all threads and counts the keys in the range by bin. Each round spreads what is left over all bins, so
// that scores of a few exponents, as index scores are, do not meet in a few counters.
template <typename Count>
__device__ Kth FindKth(Scratch& scratch, KeyRange range, uint32_t rank, Count count) {
  for (;;) {
    const uint32_t shift = range.Shift();
    const TwoBins bins = count(range, shift);
    uint32_t all;
    const uint32_t before = ExclusiveScan<uint32_t>(scratch, bins.upper + bins.lower, &all);
    const uint32_t upper = kBins - 1 - 2 * threadIdx.x;
    if (before < rank && rank <= before + bins.upper) {
      scratch.bin = upper;
      scratch.rank = rank - before;
    } else if (before + bins.upper < rank && rank <= before + bins.upper + bins.lower) {
      scratch.bin = upper - 1;
      scratch.rank = rank - before - bins.upper;
    }
    __syncthreads();
    rank = scratch.rank;
    const uint32_t skipped = scratch.bin << shift;
    // The uppermost bin may reach over the end of the range, behind which there may be keys, too.
    range = {range.low + skipped, min((1u << shift) - 1, range.span - skipped)};
    if (shift == 0) return {range.low + 1, rank};
  }
}

// Counts the keys of a list in shared memory.
struct CountList {
  Scratch& scratch;
  const uint32_t* keys;
  uint32_t length;

  __device__ TwoBins operator()(KeyRange range, uint32_t shift) const {
    scratch.ClearHistogram();
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
      const uint32_t key = keys[i];
      if (range.Has(key)) atomicAdd(&scratch.histogram[range.Bin(key, shift)], 1u);
    }
    __syncthreads();
    const uint32_t upper = kBins - 1 - 2 * threadIdx.x;
    return {scratch.histogram[upper], scratch.histogram[upper - 1]};
  }
};

}  // namespace echo_ffi::top_k

#endif  // ECHO_FFI_FIND_KTH_CUH_
