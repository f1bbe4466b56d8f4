// The slots of lowest (priority, slot) among those that are not protected, by a cluster that guesses a bound of them.
//
//     bound = the r-th lowest of a sample of all slots
//     candidates = slots at or below the bound that are not protected
//     the wanted ones = the lowest of the candidates, if those are enough
//
// Exact whenever it answers: a guess that catches too few slots, or more than there is room for, is told to the caller, who
// counts instead (slots_select.cuh). What it saves is passes over all slots: there is one, and it compares.
//
// How r is chosen. Of kSamples = s places in n slots, the number below the w-th lowest slot is near x = w s / n, with a
// spread of sqrt(x). r = x + 4 sqrt(x) + 4 misses w slots less than once in 10,000 guesses (Poisson; twice in a million at
// x < 1), and catches r n / s, 600 of 300,000 slots for 50 wanted ones. Nothing is assumed of where low priorities lie: a
// place is drawn in each of s equal parts of the pool.
#ifndef ECHO_FFI_SLOTS_GUESS_CUH_
#define ECHO_FFI_SLOTS_GUESS_CUH_

#include <cstdint>

#include "find_kth.cuh"
#include "slots_select.cuh"
#include "slots_task.cuh"

namespace echo_ffi {

// Key of a priority whose highest value is the lowest priority.
__device__ inline uint32_t Inverted(int32_t priority) { return ~Ordered(priority); }

// The slot of a sample, ascending; beyond the last slot where there are fewer slots than samples.
__device__ inline int32_t SampledSlot(int sample, int32_t slots) {
  if (slots <= kSamples) return sample;
  const auto begin = static_cast<uint32_t>(static_cast<uint64_t>(sample) * slots / kSamples);
  const auto end = static_cast<uint32_t>(static_cast<uint64_t>(sample + 1) * slots / kSamples);
  const uint32_t drawn = static_cast<uint32_t>(sample + 1) * 2654435761u;
  return static_cast<int32_t>(begin + static_cast<uint32_t>(static_cast<uint64_t>(drawn) * (end - begin) >> 32));
}

// How low a sample has to be for the bound of `wanted` slots.
__device__ inline int BoundRank(int wanted, int32_t slots) {
  if (slots <= kSamples) return slots;
  const float expected = static_cast<float>(wanted) * kSamples / static_cast<float>(slots);
  return min(static_cast<int>(expected + 4 * sqrtf(expected)) + 4, kSamples);
}

// The block's part of the samples, on its way to every block; there by the next barrier of the cluster. The blocks have
// started.
template <int kBlocks>
struct SampleShare {
  static constexpr int kOfBlock = kSamples / kBlocks;
  static constexpr int kOfThread = (kOfBlock + kThreads - 1) / kThreads;
  uint32_t key[kOfThread];

  __device__ void Load(const Block<kBlocks>& block) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      const int32_t slot = SampledSlot(block.rank * kOfBlock + at, block.task.device_slots);
      key[i] = at < kOfBlock && block.IsSlot(slot) ? Inverted(__ldcg(block.task.priority + slot)) : 0;
    }
  }

  __device__ void Share(Block<kBlocks>& block) const {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      if (at >= kOfBlock) continue;
#pragma unroll 4
      for (int peer = 0; peer < kBlocks; ++peer) {
        *Remote(&block.shared.guess.samples[block.rank * kOfBlock + at], peer) = key[i];
      }
    }
  }
};

// A slot of the pool in the order of (priority, slot).
struct Place {
  int32_t priority;
  int32_t slot;
};

// The rank-th lowest sample. Every block finds the same.
template <int kBlocks>
__device__ Place FindGuess(Block<kBlocks>& block, int rank) {
  auto& guess = block.shared.guess;
  constexpr int kOfThread = kSamples / kThreads;
  const int first = static_cast<int>(threadIdx.x) * kOfThread;
  uint32_t key[kOfThread];
  uint32_t low = ~0u, high = 0;
  guess.kth.ClearHistogram();
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    key[i] = guess.samples[first + i];
    if (first + i >= block.task.device_slots) continue;
    low = min(low, key[i]);
    high = max(high, key[i]);
  }
  low = __reduce_min_sync(kAllLanes, low);
  high = __reduce_max_sync(kAllLanes, high);
  if (Lane() == 0) {
    guess.lows[Warp()] = low;
    guess.highs[Warp()] = high;
  }
  __syncthreads();
  low = __reduce_min_sync(kAllLanes, guess.lows[Lane()]);
  high = __reduce_max_sync(kAllLanes, guess.highs[Lane()]);
  ECHO_PHASE(RangeFound);
  const top_k::KeyRange keys{low - 1, high - low};
  const auto samples = static_cast<uint32_t>(min(block.task.device_slots, kSamples));
  const top_k::ListedKeys listed{guess.kth, guess.samples, samples};
  const top_k::Kth kth = top_k::FindKth(guess.kth, keys, static_cast<uint32_t>(rank), listed);
  ECHO_PHASE(KthFound);
  int ties = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) key[i] = guess.samples[first + i];  // read again: registers are scarce above
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) ties += key[i] == kth.key && first + i < block.task.device_slots;
  int before = BlockSum(ties, guess.totals).before;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    if (key[i] != kth.key || first + i >= block.task.device_slots) continue;
    if (++before == static_cast<int>(kth.ties)) guess.bound_slot = SampledSlot(first + i, block.task.device_slots);
  }
  __syncthreads();
  ECHO_PHASE(BoundFound);
  return {static_cast<int32_t>(~kth.key ^ 0x80000000u), guess.bound_slot};
}

// The block's slots at or below the bound that are not protected, in any order, into `own`; how many to every block. Keys
// and marks are there.
template <int kBlocks>
__device__ void Collect(Block<kBlocks>& block, Place bound) {
  auto& guess = block.shared.guess;
  const int count = block.own_slots();
  const int first_slot = static_cast<int>(block.first_slot());
  const int ties_end = bound.slot - first_slot;  // the last of the block's slots that is taken at the bound's priority
  if (threadIdx.x == 0) guess.own_count = 0;
  __syncthreads();
  for (int at = threadIdx.x * 4; at < count; at += kThreads * 4) {
    const int4 key = block.task.are_keys_shared ? *reinterpret_cast<const int4*>(block.keys + at)
                                                : FourKeys(block.task.priority + first_slot + at, count - at);
    const uint32_t open = ~block.is_protected[at / 32] >> at % 32;
    const int32_t keys[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool is_low = keys[i] < bound.priority || (keys[i] == bound.priority && at + i <= ties_end);
      if (!is_low || !(open >> i & 1)) continue;
      const int to = atomicAdd(&guess.own_count, 1);
      const auto slot = static_cast<uint32_t>(first_slot + at + i);
      if (to < kMostCandidates) guess.own[to] = static_cast<uint64_t>(Ordered(keys[i])) << 32 | slot;
    }
  }
  __syncthreads();
  if (threadIdx.x < kBlocks) *Remote(&guess.count_of_blocks[block.rank], threadIdx.x) = guess.own_count;
}

// How many candidates there are; the same in every block, after a barrier behind Collect.
template <int kBlocks>
__device__ int Candidates(const Block<kBlocks>& block) {
  int64_t candidates = 0;
#pragma unroll
  for (int peer = 0; peer < kBlocks; ++peer) candidates += block.shared.guess.count_of_blocks[peer];
  return static_cast<int>(min(candidates, int64_t{kMostCandidates} + 1));
}

// The `wanted` lowest of the candidates, by rank, into `taken` of every block; there by the next barrier. Every block gets all
// candidates and ranks a part of them, a warp each.
template <int kBlocks>
__device__ void RankCandidates(Block<kBlocks>& block, int candidates, int wanted) {
  auto& guess = block.shared.guess;
  for (int i = threadIdx.x; i < candidates; i += kThreads) {
    int peer = 0, begin = 0, end = 0;
#pragma unroll
    for (int other = 0; other < kBlocks; ++other) {  // all counts are read at once
      end += guess.count_of_blocks[other];
      if (i < end) continue;
      peer = other + 1;
      begin = end;
    }
    guess.all[i] = *Remote(&guess.own[i - begin], peer);
  }
  __syncthreads();
  ECHO_PHASE(Gathered);
  for (int i = Warp() * kBlocks + block.rank; i < candidates; i += kWarps * kBlocks) {
    const uint64_t key = guess.all[i];
    int lower = 0;
#pragma unroll 4
    for (int other = Lane(); other < candidates; other += 32) lower += guess.all[other] < key;
    const int rank = __reduce_add_sync(kAllLanes, lower);
    if (rank >= wanted) continue;
    const auto slot = static_cast<int32_t>(key & 0xffffffffu);
    if (Lane() < kBlocks) *Remote(&guess.taken[rank], Lane()) = slot;
    if (Lane() == 0) FetchToL2(block.task.host_of + slot);  // who leaves it is asked next
  }
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_GUESS_CUH_
