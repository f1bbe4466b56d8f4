// The slots of lowest (priority, slot) among those that are not protected, by a cluster that guesses a bound of them.
//
//     bound = a sample that at least r - 1 other samples are below
//     candidates = slots at or below the bound that are not protected
//     the wanted ones = the lowest of the candidates, if those are enough
//
// Exact whenever it answers: a guess that catches too few slots, or more than there is room for, is told to the caller, who
// counts instead (slots_select.cuh). What it saves is passes over all slots: there is one, and it compares.
//
// How r is chosen. Of kSamples = s places in n slots, the number below the w-th lowest slot is near x = w s / n, with a
// spread of sqrt(x). r = x + 4 sqrt(x) + 4 misses w slots less than once in 10,000 guesses (Poisson; twice in a million at
// x < 1), and catches a little more than r n / s, some 500 of 300,000 slots for 50 wanted ones. Nothing is assumed of where
// low priorities lie: a place is drawn in each of s equal parts of the pool, and neighbours go to different blocks.
//
// How the bound is found. Each lane has one group of samples, of which the lowest is kept, and the r-th lowest of those is
// the bound: of a sorted list the first r would be in r groups as a rule, and neighbours are in different groups. For r
// above the number of groups, each block has as many of its own, and the lowest few of each block are compared.
#ifndef ECHO_FFI_SLOTS_GUESS_CUH_
#define ECHO_FFI_SLOTS_GUESS_CUH_

#include <cstdint>

#include "slots_select.cuh"
#include "slots_task.cuh"

namespace echo_ffi {

// A slot's place in the order of (priority, slot).
__device__ inline uint64_t PlaceOf(int32_t priority, int64_t slot) {
  return static_cast<uint64_t>(Ordered(priority)) << 32 | static_cast<uint32_t>(slot);
}

__device__ inline int32_t PriorityOf(uint64_t place) {
  return static_cast<int32_t>(static_cast<uint32_t>(place >> 32) ^ 0x80000000u);
}

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
  const float expected = static_cast<float>(wanted) * kSamples / static_cast<float>(slots);
  return static_cast<int>(min(expected + 4 * sqrtf(expected), 1e6f)) + 4;
}

// Whether so many slots are looked for by a guess. Of a small pool all slots are candidates; of a large one those expected
// must leave room in each block for how unevenly they may lie.
template <int kBlocks>
__device__ bool IsGuessed(int wanted, int32_t slots) {
  using Guess = GuessShared<kBlocks>;
  if (wanted > kMostGuessed || wanted > slots) return false;
  if (slots <= kSamples) return true;
  const int rank = BoundRank(wanted, slots);
  const float of_block = static_cast<float>(rank) / kSamples * static_cast<float>(slots) / kBlocks;
  return rank <= max(kGroups, kBlocks * Guess::kFew / 2) && of_block + 4 * sqrtf(of_block) <= Guess::kRoom;
}

// This thread's part of the block's samples, on its way as soon as it is made.
template <int kBlocks>
struct Samples {
  static constexpr int kOfBlock = kSamples / kBlocks;
  static constexpr int kOfThread = (kOfBlock + kThreads - 1) / kThreads;
  int32_t slot[kOfThread], priority[kOfThread];

  __device__ explicit Samples(const Block<kBlocks>& block) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x);
      slot[i] = at < kOfBlock ? SampledSlot(at * kBlocks + block.rank, block.task.device_slots) : kNoSlot;
      if (slot[i] >= block.task.device_slots) slot[i] = kNoSlot;
      priority[i] = slot[i] != kNoSlot ? __ldcg(block.task.priority + slot[i]) : 0;
    }
  }

  __device__ uint64_t Lowest() const {
    uint64_t low = kNoKey;
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (slot[i] != kNoSlot) low = min(low, PlaceOf(priority[i], slot[i]));
    }
    return low;
  }
};

// The lowest of this thread's part of the block's slots that are not protected. Keys and marks are there.
template <int kBlocks>
__device__ uint64_t LowestSlot(const Block<kBlocks>& block) {
  uint64_t low = kNoKey;
  int32_t highest = INT32_MAX;  // that may still be lower
  ForEachFourOfSlots(block, [&](int at, int4 key) {
    if (min(min(key.x, key.y), min(key.z, key.w)) > highest) return;
    const uint32_t open = ~block.is_protected[at / 32] >> at % 32;
    const int32_t keys[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (open >> i & 1) low = min(low, PlaceOf(keys[i], block.SlotAt(at + i)));
    }
    if (low != kNoKey) highest = PriorityOf(low);
  });
  return low;
}

// What every block tells every other: the lowest sample of each group. There by the next barrier of the cluster; all blocks
// have started. A thread's lane is the group of its samples.
template <int kBlocks>
__device__ void ShareLows(Block<kBlocks>& block, const Samples<kBlocks>& samples) {
  auto& guess = block.shared.guess;
  constexpr int kFilled = Samples<kBlocks>::kOfBlock < kThreads ? Samples<kBlocks>::kOfBlock / 32 : kWarps;  // with samples
  if (Warp() < kFilled) guess.lows[Warp()][Lane()] = samples.Lowest();
  __syncthreads();
  if (Warp() >= kBlocks) return;
  uint64_t low = kNoKey;
#pragma unroll
  for (int warp = 0; warp < kFilled; ++warp) low = min(low, guess.lows[warp][Lane()]);
  *Remote(&guess.low_of_blocks[block.rank][Lane()], Warp()) = low;
}

// The same where one slot is wanted: the lowest of each block's slots that are not protected, in [0].
template <int kBlocks>
__device__ void ShareLowest(Block<kBlocks>& block) {
  auto& guess = block.shared.guess;
  const uint64_t of_warp = LowestOfWarp(LowestSlot(block));
  if (Lane() == 0) guess.lows[0][Warp()] = of_warp;
  __syncthreads();
  if (Warp() != 0) return;
  const uint64_t low = LowestOfWarp(guess.lows[0][Lane()]);
  if (Lane() < kBlocks) *Remote(&guess.low_of_blocks[block.rank][0], Lane()) = low;
  if (Lane() == 0 && low != kNoKey) FetchToL2(block.task.host_of + static_cast<uint32_t>(low));  // who may leave
}

// The lowest of what blocks told; every warp finds the same.
template <int kBlocks>
__device__ uint64_t LowestOfBlocks(const Block<kBlocks>& block) {
  return LowestOfWarp(Lane() < kBlocks ? block.shared.guess.low_of_blocks[Lane()][0] : kNoKey);
}

// The lowest of the samples whose number is this lane's, but for multiples of 32: those of one block in some of its groups.
template <int kBlocks>
__device__ uint64_t LowOfGroup(const Block<kBlocks>& block) {
  constexpr int kParts = 32 / kBlocks;
  const uint64_t* of_block = block.shared.guess.low_of_blocks[Lane() % kBlocks];
  uint64_t low = kNoKey;
#pragma unroll 8
  for (int group = Lane() / kBlocks; group < kGroups; group += kParts) low = min(low, of_block[group]);
  return low;
}

// How many of the lanes' keys, which differ, are lower than this lane's.
__device__ inline int RankInWarp(uint64_t key) {
  int lower = 0;
#pragma unroll 8
  for (int lane = 0; lane < 32; ++lane) lower += __shfl_sync(kAllLanes, key, lane) < key;
  return lower;
}

// The rank-th lowest (from 1) of the lanes' keys, which differ.
__device__ inline uint64_t LowestOfLanes(uint64_t key, int rank) {
  const unsigned found = __ballot_sync(kAllLanes, RankInWarp(key) == rank - 1);
  return found == 0 ? kNoKey : __shfl_sync(kAllLanes, key, __ffs(static_cast<int>(found)) - 1);
}

// Into shared.bound: the rank-th lowest (from 1) of the lowest few lows of every block. There after the block's next barrier.
template <int kBlocks>
__device__ void FindBoundAmongFew(Block<kBlocks>& block, int rank) {
  auto& guess = block.shared.guess;
  constexpr int kFew = GuessShared<kBlocks>::kFew, kAll = kBlocks * kFew, kParts = kThreads / kAll;
  static_assert(kParts >= 1 && kThreads % kAll == 0);
  const auto* few = &guess.few[0][0];
  if (Warp() < kBlocks) {  // a warp a block
    const uint64_t low = guess.low_of_blocks[Warp()][Lane()];
    const int lower = RankInWarp(low == kNoKey ? kNoKey - 1 - Lane() : low);  // those of no sample differ too
    if (lower < kFew) guess.few[Warp()][lower] = low;
  }
  if (threadIdx.x < kAll) guess.rank_of_few[threadIdx.x] = 0;
  if (threadIdx.x == 0) guess.bound = kNoKey;
  __syncthreads();
  const int own = static_cast<int>(threadIdx.x) % kAll, part = static_cast<int>(threadIdx.x) / kAll;
  int lower = 0;
#pragma unroll 4
  for (int other = part * (kAll / kParts); other < (part + 1) * (kAll / kParts); ++other) lower += few[other] < few[own];
  atomicAdd(&guess.rank_of_few[own], lower);
  __syncthreads();
  if (threadIdx.x < kAll && guess.rank_of_few[threadIdx.x] == rank - 1 && few[threadIdx.x] != kNoKey) {
    guess.bound = few[threadIdx.x];
  }
}

// Into shared.bound, there after the block's next barrier. By one warp where the rank is low: what all of them would do takes
// the shuffles of an SM a microsecond.
template <int kBlocks>
__device__ void GuessBound(Block<kBlocks>& block, int wanted) {
  auto& guess = block.shared.guess;
  if (threadIdx.x == 0) guess.own_count = 0;
  const bool has_bound = block.task.device_slots > kSamples;
  const int rank = BoundRank(wanted, block.task.device_slots);
  if (has_bound && rank > kGroups) {
    FindBoundAmongFew(block, rank);
  } else if (Warp() == 0) {
    const uint64_t bound = has_bound ? LowestOfLanes(LowOfGroup(block), rank) : kNoKey;
    if (Lane() == 0) guess.bound = bound;
  }
}

// How many of `count` ascending places are lower.
__device__ inline int CountLower(const uint64_t* places, int count, uint64_t place) {
  int low = 0;
#pragma unroll 1
  while (count > 0) {
    const int half = count / 2;
    if (places[low + half] < place) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

// The block's slots at or below the bound that are not protected, in ascending order, to every block, and how many there are;
// there by the next barrier of the cluster. Keys and marks are there, and what blocks told of `wanted` slots.
template <int kBlocks>
__device__ void Collect(Block<kBlocks>& block, int wanted) {
  auto& guess = block.shared.guess;
  constexpr int kRoom = GuessShared<kBlocks>::kRoom;
  GuessBound(block, wanted);
  __syncthreads();
  const uint64_t bound = guess.bound;
  const int32_t highest = PriorityOf(bound);
  ForEachFourOfSlots(block, [&](int at, int4 key) {
    if (min(min(key.x, key.y), min(key.z, key.w)) > highest) return;
    const uint32_t open = ~block.is_protected[at / 32] >> at % 32;
    const int32_t keys[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint64_t place = PlaceOf(keys[i], block.SlotAt(at + i));
      if (!(open >> i & 1) || place > bound) continue;
      const int to = atomicAdd(&guess.own_count, 1);
      if (to < kRoom) guess.own[to] = place;
    }
  });
  __syncthreads();
  const int found = guess.own_count;
  if (threadIdx.x < kBlocks) *Remote(&guess.count_of_blocks[block.rank], threadIdx.x) = found;
  if (found > kRoom) return;  // the whole block: no guess then
  // Each place among the block's own: a few threads compare it with a part of them.
  constexpr int kAtOnce = 128, kParts = kThreads / kAtOnce;
#pragma unroll 1
  for (int i = threadIdx.x; i < found; i += kThreads) guess.rank[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x % kAtOnce; i < found; i += kAtOnce) {
    const uint64_t place = guess.own[i];
    int lower = 0;
#pragma unroll 4
    for (int other = static_cast<int>(threadIdx.x) / kAtOnce; other < found; other += kParts) lower += guess.own[other] < place;
    if (lower > 0) atomicAdd(&guess.rank[i], lower);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < found * kBlocks; i += kThreads) {
    *Remote(&guess.of_blocks[block.rank][guess.rank[i / kBlocks]], i % kBlocks) = guess.own[i / kBlocks];
  }
}

// Whether there are `wanted` candidates, and room for all; the same in every block.
template <int kBlocks>
__device__ bool AreEnough(const Block<kBlocks>& block, int wanted) {
  const int count = Lane() < kBlocks ? block.shared.guess.count_of_blocks[Lane()] : 0;
  if (__ballot_sync(kAllLanes, count > GuessShared<kBlocks>::kRoom) != 0) return false;
  return __reduce_add_sync(kAllLanes, count) >= wanted;
}

// The `wanted` lowest of the candidates, by rank, into `taken` of every block; there by the next barrier. Every block has
// all candidates and ranks its own, whose ranks within the block are known: a thread looks for one in one other block's.
template <int kBlocks>
__device__ void RankCandidates(Block<kBlocks>& block, int wanted) {
  auto& guess = block.shared.guess;
  const int own = guess.own_count;
#pragma unroll 1
  for (int i = threadIdx.x; i < own * kBlocks; i += kThreads) {
    const int peer = i % kBlocks;
    if (peer == block.rank) continue;
    const int lower = CountLower(guess.of_blocks[peer], guess.count_of_blocks[peer], guess.own[i / kBlocks]);
    if (lower > 0) atomicAdd(&guess.rank[i / kBlocks], lower);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < own * kBlocks; i += kThreads) {
    const int rank = guess.rank[i / kBlocks];
    if (rank >= wanted) continue;
    const auto slot = static_cast<int32_t>(guess.own[i / kBlocks] & 0xffffffffu);
    *Remote(&guess.taken[rank], i % kBlocks) = slot;
    if (i % kBlocks == 0) FetchToL2(block.task.host_of + slot);  // who leaves it is asked next
  }
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_GUESS_CUH_
