// The slots of lowest (priority, slot) among those that are not protected, by a cluster.
//
// Few are wanted, as in a step of decoding: each block proposes so many of the slots dealt to it, all blocks get all
// proposals, and each finds the lowest for itself: one barrier of the cluster (Propose, then Settle).
// Many are wanted, or the priorities do not fit into shared memory: SelectMany, a radix select over all slots, the taken
// ones in order of slots, and a stable radix sort of those by priority.
//
// Order keys. A priority becomes an unsigned number in the order of priorities; a slot, or its place among the slots of a
// block, stands below it, so that no two keys are equal.
#ifndef ECHO_FFI_SLOTS_SELECT_CUH_
#define ECHO_FFI_SLOTS_SELECT_CUH_

#include <cstdint>

#include "slots_task.cuh"

namespace echo_ffi {

inline constexpr uint64_t kNoKey = ~uint64_t{0};

__device__ inline uint32_t Ordered(int32_t priority) { return static_cast<uint32_t>(priority) ^ 0x80000000u; }

// ---- the bin that holds the one of a rank ---------------------------------------------------------------------------

struct Bin {
  int number;
  int before;  // counted in lower bins
  int size;
};

// The bin of the `wanted`-th one (from 1), where each thread knows the size of the bin of its number.
template <int kBlocks>
__device__ Bin FindBin(Block<kBlocks>& block, int size, int wanted) {
  auto& shared = block.shared;
  const Prefix prefix = BlockSum(size, shared.totals);
  if (prefix.before < wanted && wanted <= prefix.before + size) {
    shared.bin = threadIdx.x;
    shared.bin_before = prefix.before;
    shared.bin_size = size;
  }
  __syncthreads();
  return {shared.bin, shared.bin_before, shared.bin_size};
}

// ---- few ---------------------------------------------------------------------------------------------------------------

// A bound that at least `wanted` of the threads' values do not pass, and few more; kNoKey where so many have none below it.
template <int kBlocks>
__device__ uint64_t BoundOf(Block<kBlocks>& block, uint64_t value, int wanted) {
  auto& shared = block.shared;
  constexpr int kSlack = 32;
  bool is_active = value != kNoKey;
  for (int found = 0;;) {
    shared.histogram[0][threadIdx.x] = 0;
    const Range range = BlockRange({is_active ? value : kNoKey, is_active ? value : 0}, shared.ranges);
    if (range.low > range.high) return kNoKey;
    const int shift = max(Bits(range.high - range.low) - 10, 0);
    const int bin = is_active ? static_cast<int>((value - range.low) >> shift) : -1;
    if (is_active) atomicAdd(&shared.histogram[0][bin], 1u);
    if (threadIdx.x == 0) shared.bin = -1;
    __syncthreads();
    const Bin chosen = FindBin(block, static_cast<int>(shared.histogram[0][threadIdx.x]), wanted - found);
    if (chosen.number < 0) return kNoKey;
    const int below = found + chosen.before;
    if (shift == 0 || below + chosen.size <= wanted + kSlack) {
      return range.low + ((static_cast<uint64_t>(chosen.number) + 1) << shift) - 1;
    }
    found = below;
    is_active = is_active && bin == chosen.number;
  }
}

// Tells every block this block's `wanted` lowest, or that there was no room to find them. Ends before the cluster's
// barrier.
template <int kBlocks>
__device__ void Propose(Block<kBlocks>& block, int wanted) {
  auto& shared = block.shared;
  const AllocateTask& task = block.task;
  const int place_bits = Bits(static_cast<uint64_t>(max(task.dealt - 1, 1)));
  const auto key_at = [&](int dealt) {
    if (block.is_protected[dealt >> 5] >> (dealt & 31) & 1) return kNoKey;
    return static_cast<uint64_t>(Ordered(block.keys[dealt])) << place_bits | static_cast<uint64_t>(dealt);
  };
  // A thread's own lowest come first: so many of them as are wanted bound the lowest of all.
  uint64_t lowest = kNoKey;
#pragma unroll 4
  for (int dealt = threadIdx.x; dealt < task.dealt; dealt += kThreads) {
    const uint64_t key = key_at(dealt);
    lowest = key < lowest ? key : lowest;
  }
  const uint64_t bound = BoundOf(block, lowest, wanted);
  if (threadIdx.x == 0) shared.count = 0;
  __syncthreads();
  if (lowest <= bound && lowest != kNoKey) {
    for (int dealt = threadIdx.x; dealt < task.dealt; dealt += kThreads) {
      const uint64_t key = key_at(dealt);
      if (key > bound || key == kNoKey) continue;
      const int at = atomicAdd(&shared.count, 1);
      const uint64_t priority = key >> place_bits;
      if (at < kCandidates) shared.chosen[at] = priority << 32 | static_cast<uint32_t>(block.SlotAt(dealt));
    }
  }
  __syncthreads();
  const int count = shared.count;
  const int proposals = count > kCandidates ? -1 : min(count, wanted);
  if (threadIdx.x < kBlocks) *Remote(&shared.proposals_of_blocks[block.rank], threadIdx.x) = proposals;
  if (proposals >= 0 && static_cast<int>(threadIdx.x) < count) {
    const uint64_t own = shared.chosen[threadIdx.x];
    int rank = 0;
    for (int other = 0; other < count; ++other) rank += shared.chosen[other] < own;
    if (rank < wanted) {
      FetchToL2(task.host_of + static_cast<uint32_t>(own));  // who leaves, should it be taken
#pragma unroll 4
      for (int peer = 0; peer < kBlocks; ++peer) {
        *Remote(&shared.proposed_of_blocks[block.rank * wanted + rank], peer) = own;
      }
    }
  }
}

// After the barrier: shared.taken[rank] for every rank < needed <= wanted. The same in every block; -1 where there are not
// enough slots. Returns how many of them were in use; ends with a barrier of the block.
template <int kBlocks>
__device__ int Settle(Block<kBlocks>& block, int wanted, int needed) {
  auto& shared = block.shared;
  // Any split of `needed` over some blocks gives a bound: nothing above the highest of their last shares is taken. Equal
  // shares of the best 1, 2, 4 .. blocks are tried, which fits slots that are spread and slots that lie together.
  constexpr int kSplits = kBlocks == 16 ? 5 : kBlocks == 8 ? 4 : kBlocks == 4 ? 3 : 2;
  static_assert((1 << (kSplits - 1)) == kBlocks);
  if (Warp() < kSplits) {
    const int among = 1 << Warp(), share = (needed + among - 1) / among;
    const bool has_share = Lane() < kBlocks && shared.proposals_of_blocks[Lane() % kBlocks] >= share;
    const uint64_t last = has_share ? shared.proposed_of_blocks[Lane() * wanted + share - 1] : kNoKey;
    int rank = 0;
#pragma unroll 4
    for (int lane = 0; lane < kBlocks; ++lane) {
      const uint64_t other = __shfl_sync(kAllLanes, last, lane);
      rank += other < last || (other == last && lane < Lane());
    }
    if (Lane() < kBlocks && rank == among - 1) shared.bounds[Warp()] = last;
  }
  if (threadIdx.x == 0) shared.count = shared.bin = 0;
  if (static_cast<int>(threadIdx.x) < needed) shared.taken[threadIdx.x] = -1;
  __syncthreads();
  uint64_t bound = kNoKey;
  for (int split = 0; split < kSplits; ++split) bound = min(bound, shared.bounds[split]);
  const int from = threadIdx.x / wanted, at = threadIdx.x % wanted;
  if (from < kBlocks && at < shared.proposals_of_blocks[from]) {
    const uint64_t key = shared.proposed_of_blocks[threadIdx.x];
    if (key <= bound) shared.chosen[atomicAdd(&shared.count, 1)] = key;
  }
  __syncthreads();
  const int count = shared.count;
  bool was_used = false;
  if (static_cast<int>(threadIdx.x) < count) {
    const uint64_t own = shared.chosen[threadIdx.x];
    int rank = 0;
    for (int other = 0; other < count; ++other) rank += shared.chosen[other] < own;
    if (rank < needed) {
      shared.taken[rank] = static_cast<int32_t>(own);
      was_used = own >> 32 != Ordered(kFreePriority);
    }
  }
  const unsigned used = __ballot_sync(kAllLanes, was_used);
  if (Lane() == 0 && used != 0) atomicAdd(&shared.bin, __popc(used));
  __syncthreads();
  return shared.bin;
}

// ---- many --------------------------------------------------------------------------------------------------------------

struct Taken {
  const int32_t* slots;  // in order of (priority, slot), in global memory
  int count;
  int used;  // how many of them were in use
};

// The slots of the adjacent part of this block as (key, slot), a warp's words of 32 one after the other.
template <int kBlocks>
struct Adjacent {
  Block<kBlocks>& block;
  int words;      // of the block
  int run;        // words of a warp
  int first;      // slot of the block
  uint32_t low;   // Ordered priority that becomes 1; a free slot is 0
  bool only_free;

  __device__ explicit Adjacent(Block<kBlocks>& of_block)
      : block(of_block),
        words(of_block.task.adjacent / 32),
        run((words + kWarps - 1) / kWarps),
        first(of_block.rank * of_block.task.adjacent),
        low(0),
        only_free(false) {}

  // Every slot of the warp's run once: function(slot, priority, is there one to take). All lanes call it together.
  template <typename Function>
  __device__ void ForEach(Function function) const {
    for (int word = Warp() * run; word < min((Warp() + 1) * run, words); ++word) {
      const int slot = first + word * 32 + Lane();
      const bool is_open = !(block.is_adjacent_protected[word] >> Lane() & 1);
      const int32_t priority = is_open ? __ldcg(block.task.priority + slot) : 0;
      function(slot, priority, is_open && !(only_free && priority != kFreePriority));
    }
  }

  __device__ uint32_t KeyOf(int32_t priority) const { return priority == kFreePriority ? 0 : Ordered(priority) - low + 1; }
};

template <int kBlocks>
__device__ void GatherAdjacent(Block<kBlocks>& block) {
  const int words = block.task.adjacent / 32;
  for (int word = threadIdx.x; word < words; word += kThreads) {
    const int64_t slot = (static_cast<int64_t>(block.rank) * words + word) * 32;
    uint32_t bits = ~0u;
    if (slot < block.task.device_slots) {
      const int number = static_cast<int>(slot);
      bits = *Remote(block.is_protected + block.DealtAt(number) / 32, block.OwnerOf(number));
    }
    block.is_adjacent_protected[word] = bits;
  }
  __syncthreads();
}

// The highest key that is taken, key and slot together, so that exactly `wanted` are.
template <int kBlocks>
__device__ uint64_t FindLast(Adjacent<kBlocks>& adjacent, int slot_bits, int key_bits, int wanted) {
  Block<kBlocks>& block = adjacent.block;
  auto& shared = block.shared;
  uint64_t prefix = 0;
  int shift = slot_bits + key_bits;
  for (int round = 0;; ++round) {
    // The last round but one was read by everybody before the last round's barrier.
    uint32_t* histogram = shared.histogram[round & 1];
    const int above = shift;
    const int digit_bits = min(shift, 10);
    shift -= digit_bits;
    histogram[threadIdx.x] = 0;
    __syncthreads();
    adjacent.ForEach([&](int slot, int32_t priority, bool is_open) {
      const uint64_t key = static_cast<uint64_t>(adjacent.KeyOf(priority)) << slot_bits | static_cast<uint32_t>(slot);
      const bool counts = is_open && key >> above == prefix;
      const int bin = static_cast<int>(key >> shift & ((1u << digit_bits) - 1));
      // Where all lanes meet in one bin, as under one priority, one of them adds.
      const unsigned lanes = __ballot_sync(kAllLanes, counts);
      if (lanes == 0) return;
      const int leader = __ffs(static_cast<int>(lanes)) - 1;
      const int of_leader = __shfl_sync(kAllLanes, bin, leader);
      if (__all_sync(kAllLanes, !counts || bin == of_leader)) {
        if (Lane() == leader) atomicAdd(&histogram[bin], static_cast<uint32_t>(__popc(lanes)));
      } else if (counts) {
        atomicAdd(&histogram[bin], 1u);
      }
    });
    ClusterSync();
    uint32_t size = 0;
#pragma unroll 4
    for (int peer = 0; peer < kBlocks; ++peer) size += *Remote(&histogram[threadIdx.x], peer);
    const Bin chosen = FindBin(block, static_cast<int>(size), wanted);
    prefix = prefix << digit_bits | static_cast<uint64_t>(chosen.number);
    wanted -= chosen.before;
    if (wanted == chosen.size) return ((prefix + 1) << shift) - 1;
  }
}

// Sorts `size` pairs of scratch 0 by key, stably; returns where they end up.
template <int kBlocks>
__device__ int SortTaken(Block<kBlocks>& block, int size, int key_bits) {
  auto& shared = block.shared;
  const int segment = (size + kBlocks - 1) / kBlocks;
  const int run = ((segment + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int block_end = min((block.rank + 1) * segment, size);
  const int begin = min(block.rank * segment + Warp() * run, block_end), end = min(begin + run, block_end);
  int from = 0;
  for (int shift = 0; shift < key_bits; shift += 8, from ^= 1) {
    const uint32_t* keys = block.sort_keys(from);
    const int32_t* slots = block.sort_slots(from);
    uint32_t* own = shared.warp_digits[Warp()];
    for (int digit = Lane(); digit < kDigits; digit += 32) own[digit] = 0;
    __syncwarp();
    // Every element of the warp's run in order, 32 at a time: function(place, digit, lanes of its digit).
    const auto for_each = [&](auto function) {
      for (int base = begin; base < end; base += 32) {
        const int at = base + Lane();
        const unsigned lanes = __ballot_sync(kAllLanes, at < end);
        if (at < end) {
          const int digit = static_cast<int>(__ldcg(keys + at) >> shift & (kDigits - 1));
          function(at, digit, __match_any_sync(lanes, digit));
        }
        __syncwarp();
      }
    };
    // Adds to the warp's count of a digit, once for all lanes that have it; returns what it was.
    const auto count = [&](int digit, unsigned lanes) {
      const int leader = __ffs(static_cast<int>(lanes)) - 1;
      uint32_t before = 0;
      if (Lane() == leader) {
        before = own[digit];
        own[digit] = before + __popc(lanes);
      }
      return static_cast<int>(__shfl_sync(lanes, before, leader));
    };
    for_each([&](int, int digit, unsigned lanes) { count(digit, lanes); });
    __syncthreads();
    if (threadIdx.x < kDigits) {
      uint32_t sum = 0;
#pragma unroll 4
      for (int warp = 0; warp < kWarps; ++warp) {
        const uint32_t of_warp = shared.warp_digits[warp][threadIdx.x];
        shared.warp_digits[warp][threadIdx.x] = sum;
        sum += of_warp;
      }
      shared.digits[threadIdx.x] = sum;
    }
    ClusterSync();
    int of_all = 0, before = 0;
    if (threadIdx.x < kDigits) {
#pragma unroll 4
      for (int peer = 0; peer < kBlocks; ++peer) {
        const int theirs = static_cast<int>(*Remote(&shared.digits[threadIdx.x], peer));
        before += peer < block.rank ? theirs : 0;
        of_all += theirs;
      }
    }
    const Prefix prefix = BlockSum(of_all, shared.totals);
    if (threadIdx.x < kDigits) shared.digit_start[threadIdx.x] = prefix.before + before;
    __syncthreads();
    uint32_t* sorted_keys = block.sort_keys(from ^ 1);
    int32_t* sorted_slots = block.sort_slots(from ^ 1);
    for_each([&](int at, int digit, unsigned lanes) {
      const int to = shared.digit_start[digit] + count(digit, lanes) + __popc(lanes & ((1u << Lane()) - 1));
      sorted_keys[to] = __ldcg(keys + at);
      sorted_slots[to] = __ldcg(slots + at);
    });
    ClusterSync();
  }
  return from;
}

// The `wanted` lowest slots, or all that are not protected where they are fewer. Called by all blocks together, after
// protection is marked and before any priority changes that is not protected.
template <int kBlocks>
__device__ Taken SelectMany(Block<kBlocks>& block, int wanted) {
  auto& shared = block.shared;
  GatherAdjacent(block);
  Adjacent<kBlocks> adjacent(block);

  Range range{kNoKey, 0};
  int free = 0, used = 0;
  adjacent.ForEach([&](int, int32_t priority, bool is_open) {
    free += is_open && priority == kFreePriority;
    if (!is_open || priority == kFreePriority) return;
    ++used;
    const uint64_t key = Ordered(priority);
    range = {min(range.low, key), max(range.high, key)};
  });
  range = BlockRange(range, shared.ranges);
  free = BlockSum(free, shared.totals).total;
  __syncthreads();
  used = BlockSum(used, shared.totals).total;
  if (threadIdx.x < kBlocks) {
    *Remote(&shared.range_of_blocks[block.rank], threadIdx.x) = range;
    *Remote(&shared.free_of_blocks[block.rank], threadIdx.x) = free;
    *Remote(&shared.used_of_blocks[block.rank], threadIdx.x) = used;
  }
  ClusterSync();
  range = {kNoKey, 0};
  free = used = 0;
#pragma unroll 1
  for (int peer = 0; peer < kBlocks; ++peer) {
    range = {min(range.low, shared.range_of_blocks[peer].low), max(range.high, shared.range_of_blocks[peer].high)};
    free += shared.free_of_blocks[peer];
    used += shared.used_of_blocks[peer];
  }
  wanted = min(wanted, free + used);
  adjacent.only_free = free >= wanted;
  if (!adjacent.only_free) adjacent.low = static_cast<uint32_t>(range.low);
  if (wanted == 0) return {block.sort_slots(0), 0, 0};

  const int slot_bits = Bits(static_cast<uint64_t>(max(block.task.device_slots - 1, 1)));
  const int key_bits = adjacent.only_free ? 0 : Bits(range.high - range.low + 1);
  const uint64_t last = FindLast(adjacent, slot_bits, key_bits, wanted);

  // The taken ones in order of slots.
  const auto is_taken = [&](int slot, int32_t priority, bool is_open) {
    const uint64_t key = static_cast<uint64_t>(adjacent.KeyOf(priority)) << slot_bits | static_cast<uint32_t>(slot);
    return is_open && key <= last;
  };
  int in_run = 0;
  adjacent.ForEach([&](int slot, int32_t priority, bool is_open) {
    in_run += __popc(__ballot_sync(kAllLanes, is_taken(slot, priority, is_open)));
  });
  if (Lane() == 0) shared.totals[Warp()] = in_run;
  __syncthreads();
  const Prefix warps = PrefixOfWarps(shared.totals);
  if (threadIdx.x < kBlocks) *Remote(&shared.taken_of_blocks[block.rank], threadIdx.x) = warps.total;
  ClusterSync();
  int next = warps.before;
  for (int peer = 0; peer < block.rank; ++peer) next += shared.taken_of_blocks[peer];
  adjacent.ForEach([&](int slot, int32_t priority, bool is_open) {
    const bool takes = is_taken(slot, priority, is_open);
    const unsigned lanes = __ballot_sync(kAllLanes, takes);
    if (takes) {
      const int to = next + __popc(lanes & ((1u << Lane()) - 1));
      block.sort_keys(0)[to] = adjacent.KeyOf(priority);
      block.sort_slots(0)[to] = slot;
    }
    next += __popc(lanes);
  });
  ClusterSync();
  const int where = SortTaken(block, wanted, Bits(last >> slot_bits));
  return {block.sort_slots(where), wanted, wanted - min(wanted, free)};
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_SELECT_CUH_
