// Which keys of a row are worth a closer look, listed in shared memory: those above a bound. Knows where bounds come
// from and how a block lists its segment; not what is then done with the lists (top_k_kernel.cuh).
//
// A bound is good when somewhat more than k keys lie above it. It is the caller's, or a small sample of the row tells
// one that is good most likely. Where the caller has marked the places above its bound while the scores were made, only
// these scores are read.
#ifndef ECHO_FFI_TOP_K_LIST_CUH_
#define ECHO_FFI_TOP_K_LIST_CUH_

#include <cstdint>

#include "cluster.cuh"
#include "echo_ffi/order.h"
#include "find_kth.cuh"
#include "row_scores.cuh"

namespace echo_ffi::top_k {

constexpr uint32_t kCapacity = 12288;      // keys a list holds
constexpr uint32_t kMinSample = 2048;      // a power of two, as kMaxSample
constexpr uint32_t kMaxSample = 8192;
constexpr uint32_t kSampledAboveKth = 32;  // wanted: so many of the k best are in the sample
constexpr uint32_t kWindow = 131072;       // places that are emitted at once
constexpr uint32_t kWindowWords = kWindow / 32;
static_assert(kMaxSample <= kCapacity && kWindow % (kBatch * kThreads) == 0);

// What somebody knew of a row before. Neither changes what is selected.
struct Hint {
  uint32_t bound;         // the key of a score that, it is hoped, a few more than k exceed; 0 for none
  const uint32_t* above;  // a bit for each position, 32 a word, where the score may exceed it; nullptr for none
};

// How many keys lie above a key, and how many equal it.
struct Counts {
  uint32_t above;
  uint32_t ties;
};

// What one block holds in shared memory. Others of its cluster read keys, counts, extremes and the histogram.
struct Shared {
  Scratch scratch;
  uint32_t highest_of_warp[kWarps];
  uint32_t lowest_of_warp[kWarps];
  Counts counts;     // of this block's segment
  uint32_t highest;  // of the listed keys
  uint32_t lowest;
  Counts before;                 // in the segments before it
  uint32_t keys[kCapacity];      // the sample; then the listed keys of this segment
  uint32_t places[kCapacity];    // where in the segment they lie
  uint32_t gathered[kCapacity];  // the listed keys of all segments, in order of segment; read while bits are marked
  struct {
    alignas(16) uint32_t above[kWindowWords];
    alignas(16) uint32_t ties[kWindowWords];

    // This thread's words, which it leaves clear: nobody else looks at them.
    __device__ void Take(uint4* above_words, uint4* tie_words) {
      *above_words = reinterpret_cast<uint4*>(above)[threadIdx.x];
      *tie_words = reinterpret_cast<uint4*>(ties)[threadIdx.x];
      Clear();
    }
    __device__ void Clear() {
      reinterpret_cast<uint4*>(above)[threadIdx.x] = reinterpret_cast<uint4*>(ties)[threadIdx.x] = uint4{0, 0, 0, 0};
    }
  } bits;  // all clear but while positions are emitted

  // Before a list is made; the block meets here. `lowest_listed` is no higher than any key that will be listed.
  __device__ void StartList(uint32_t lowest_listed) {
    if (threadIdx.x == 0) {
      counts = {0, 0};
      highest = 0;
      lowest = lowest_listed;
      before = {0, 0};
    }
    __syncthreads();
  }
};

// Position of the i-th of 2^log_samples samples of `visible` scores: one somewhere in each of as many equal stretches.
__device__ inline uint32_t SampledPosition(uint32_t i, uint32_t log_samples, uint32_t visible) {
  const auto start = [=](uint32_t stretch) {
    return static_cast<uint32_t>((static_cast<uint64_t>(stretch) * visible) >> log_samples);
  };
  return start(i) + __umulhi((i + 1) * 2654435769u, start(i + 1) - start(i));
}

// A key with k keys above it or, by far most likely, somewhat more. Every block of a cluster finds the same one. 0,
// which is below every key, where the list holds the whole row.
template <typename Bits>
__device__ uint32_t Bracket(Shared& shared, const Row<Bits>& row, uint32_t visible, uint32_t k) {
  if (visible <= kCapacity) return 0;
  uint32_t samples = kMinSample;
  const uint64_t wanted = static_cast<uint64_t>(kSampledAboveKth) * visible;
  while (samples < kMaxSample && static_cast<uint64_t>(samples) * k < wanted) samples *= 2;
  const uint32_t log_samples = kLanes - 1 - __clz(samples);
  const uint32_t lane = threadIdx.x % kLanes;
  uint32_t highest = 0, lowest = ~0u;
  for (uint32_t i = threadIdx.x; i < samples; i += kThreads) {
    const uint32_t key = row.KeyAt(SampledPosition(i, log_samples, visible));
    shared.keys[i] = key;
    highest = max(highest, key);
    lowest = min(lowest, key);
  }
  highest = __reduce_max_sync(kAllLanes, highest);
  lowest = __reduce_min_sync(kAllLanes, lowest);
  if (lane == 0) {
    shared.highest_of_warp[threadIdx.x / kLanes] = highest;
    shared.lowest_of_warp[threadIdx.x / kLanes] = lowest;
  }
  __syncthreads();
  highest = __reduce_max_sync(kAllLanes, shared.highest_of_warp[lane]);
  lowest = __reduce_min_sync(kAllLanes, shared.lowest_of_warp[lane]);
  // Of the k best about x are sampled, give or take sqrt(x); five times that is a miss in a million rows.
  const float x = static_cast<float>(k) * static_cast<float>(samples) / static_cast<float>(visible);
  const uint32_t rank = min(static_cast<uint32_t>(x + 5.0f * sqrtf(x)) + 4, samples);
  return FindKth(shared.scratch, KeyRange{lowest - 1, highest - lowest}, rank,
                 ListedKeys{shared.scratch, shared.keys, samples})
      .key;
}

// What the lanes before this one count, and in *first where the warp's share of *counter begins, which it adds to.
__device__ inline uint32_t PlacesInList(uint32_t mine, uint32_t* counter) {
  const uint32_t lane = threadIdx.x % kLanes;
  uint32_t through = mine;  // what the lanes up to this one append
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, through, distance);
    if (lane >= distance) through += before;
  }
  uint32_t first = 0;
  if (lane == kLanes - 1) first = atomicAdd(counter, through);
  return __shfl_sync(kAllLanes, first, kLanes - 1) + through - mine;
}

// Lists the segment's keys above the bracket; counts all of them, also those for which the list has no room.
template <typename Bits>
__device__ void Collect(Shared& shared, const Row<Bits>& row, Segment segment, uint32_t bracket) {
  shared.StartList(bracket + 1);
  uint32_t ties = 0, highest = 0;
  row.ForEachBatch(segment, [&](const uint32_t(&keys)[kBatch], uint32_t visible, uint32_t vector) {
    uint32_t above = 0, equal = 0;
#pragma unroll
    for (uint32_t e = 0; e < kBatch; ++e) {
      above |= static_cast<uint32_t>(keys[e] > bracket) << e;
      equal |= static_cast<uint32_t>(keys[e] == bracket) << e;
    }
    above &= visible;
    ties += __popc(equal & visible);
    if (!__any_sync(kAllLanes, above != 0)) return;
    uint32_t at = PlacesInList(__popc(above), &shared.counts.above);
#pragma unroll
    for (uint32_t e = 0; e < kBatch; ++e) {
      if ((above >> e & 1) == 0) continue;
      highest = max(highest, keys[e]);
      if (at < kCapacity) {
        shared.keys[at] = keys[e];
        shared.places[at] = Row<Bits>::PlaceIn(vector - segment.first, e);
      }
      ++at;
    }
  });
  ties = __reduce_add_sync(kAllLanes, ties);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (threadIdx.x % kLanes == 0) {
    if (ties != 0) atomicAdd(&shared.counts.ties, ties);
    if (highest != 0) atomicMax(&shared.highest, highest);
  }
}

// The L2 fetches a row's marks while the block learns how many of them count.
__device__ inline void FetchMarks(const uint32_t* above, int64_t words) {
  constexpr int64_t kLine = 128 / sizeof(uint32_t);
  for (int64_t word = threadIdx.x * kLine; word < words; word += kThreads * kLine) FetchToL2(above + word);
}

// Lists the keys of the marked positions among those of the words first .. last; a place is counted from the first of
// them. Counts all of them, also those for which the list has no room, whose scores nobody reads.
template <typename Bits>
__device__ void CollectMarked(Shared& shared, const Row<Bits>& row, const uint32_t* above, Segment words,
                              uint32_t visible) {
  shared.StartList(~0u);
  for (uint32_t base = words.first; base < words.last; base += kThreads) {
    const uint32_t word = base + threadIdx.x;
    uint32_t marked = 0;
    if (word < words.last) {
      marked = __ldg(above + word);
      if (visible - word * 32 < 32) marked &= (1u << (visible - word * 32)) - 1;
    }
    if (!__any_sync(kAllLanes, marked != 0)) continue;
    uint32_t at = PlacesInList(__popc(marked), &shared.counts.above);
    for (; marked != 0 && at < kCapacity; marked &= marked - 1) {
      shared.places[at++] = (word - words.first) * 32 + __ffs(marked) - 1;
    }
  }
  __syncthreads();
  // Several scores a thread are under way together: they lie far apart.
  constexpr uint32_t kTogether = 4;
  const uint32_t length = min(shared.counts.above, kCapacity), start = words.first * 32;
  uint32_t highest = 0, lowest = ~0u;
  for (uint32_t base = 0; base < length; base += kTogether * kThreads) {
    uint32_t keys[kTogether];
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      const uint32_t i = base + j * kThreads + threadIdx.x;
      keys[j] = i < length ? row.KeyAt(start + shared.places[i]) : 0;
    }
#pragma unroll
    for (uint32_t j = 0; j < kTogether; ++j) {
      const uint32_t i = base + j * kThreads + threadIdx.x;
      if (i >= length) break;
      shared.keys[i] = keys[j];
      highest = max(highest, keys[j]);
      lowest = min(lowest, keys[j]);
    }
  }
  highest = __reduce_max_sync(kAllLanes, highest);
  lowest = __reduce_min_sync(kAllLanes, lowest);
  if (threadIdx.x % kLanes == 0 && highest != 0) {
    atomicMax(&shared.highest, highest);
    atomicMin(&shared.lowest, lowest);
  }
}

}  // namespace echo_ffi::top_k

#endif  // ECHO_FFI_TOP_K_LIST_CUH_
