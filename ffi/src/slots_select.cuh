// The slots of lowest (priority, slot) among those that are not protected, by a cluster: a radix select over all slots, the
// taken ones in order of slots, and a stable radix sort of those by priority.
//
// Order keys. A priority becomes an unsigned number in the order of priorities; a slot stands below it, so that no two keys
// are equal.
#ifndef ECHO_FFI_SLOTS_SELECT_CUH_
#define ECHO_FFI_SLOTS_SELECT_CUH_

#include <cstdint>

#include "slots_task.cuh"

namespace echo_ffi {

inline constexpr uint64_t kNoKey = ~uint64_t{0};

__device__ inline uint32_t Ordered(int32_t priority) { return static_cast<uint32_t>(priority) ^ 0x80000000u; }

// The priorities of the block's slots are on their way into shared memory; WaitForCopies and a barrier end that.
template <int kBlocks>
__device__ void LoadKeys(Block<kBlocks>& block) {
  if (!block.task.are_keys_shared) return;
  const int count = block.own_slots();
#pragma unroll 1
  for (int at = threadIdx.x * 4; at < count; at += kThreads * 4) {
    CopyAsync16(block.keys + at, block.task.priority + block.first_slot() + at, min(count - at, 4) * 4);
  }
}

// The priorities of four of the block's `count` slots. A pool of any size begins where a load of 16 bytes may.
template <int kBlocks>
__device__ int4 FourOfSlots(const Block<kBlocks>& block, int at, int count) {
  if (block.task.are_keys_shared) return *reinterpret_cast<const int4*>(block.keys + at);
  const int32_t* priority = block.task.priority + block.first_slot() + at;
  if (count - at >= 4) return __ldcg(reinterpret_cast<const int4*>(priority));
  const auto key = [&](int i) { return i < count - at ? __ldcg(priority + i) : kProtected; };
  return int4{key(0), key(1), key(2), key(3)};
}

// ---- the bin that holds the one of a rank ---------------------------------------------------------------------------

struct Bin {
  int number;
  int before;  // counted in lower bins
  int size;
};

// The bin of the `wanted`-th one (from 1), where each thread knows the size of the bin of its number.
template <int kBlocks>
__device__ Bin FindBin(SelectShared<kBlocks>& shared, int size, int wanted) {
  const Prefix prefix = BlockSum(size, shared.totals);
  if (prefix.before < wanted && wanted <= prefix.before + size) {
    shared.bin = threadIdx.x;
    shared.bin_before = prefix.before;
    shared.bin_size = size;
  }
  __syncthreads();
  return {shared.bin, shared.bin_before, shared.bin_size};
}

// ---- the choice --------------------------------------------------------------------------------------------------------

struct Taken {
  const int32_t* slots;  // in order of (priority, slot), in global memory
  int count;
  int used;  // how many of them were in use
};

// The slots of a block as (key, slot), a warp's words of 32 one after the other.
template <int kBlocks>
struct Open {
  Block<kBlocks>& block;
  int run;       // words of a warp
  uint32_t low;  // Ordered priority that becomes 1; a free slot is 0
  bool only_free;

  __device__ explicit Open(Block<kBlocks>& of_block)
      : block(of_block), run((of_block.words() + kWarps - 1) / kWarps), low(0), only_free(false) {}

  // Every slot of the warp's run once: function(slot, priority, is there one to take). All lanes call it together.
  template <typename Function>
  __device__ void ForEach(Function function) const {
    const int end = min((Warp() + 1) * run, block.words());
    for (int word = Warp() * run; word < end; ++word) {
      const int at = word * 32 + Lane();
      const int slot = static_cast<int>(block.first_slot()) + at;
      const bool is_open = !(block.is_protected[word] >> Lane() & 1);
      int32_t priority = 0;
      if (is_open) priority = block.task.are_keys_shared ? block.keys[at] : __ldcg(block.task.priority + slot);
      function(slot, priority, is_open && !(only_free && priority != kFreePriority));
    }
  }

  __device__ uint32_t KeyOf(int32_t priority) const { return priority == kFreePriority ? 0 : Ordered(priority) - low + 1; }
};

// The highest key that is taken, key and slot together, so that exactly `wanted` are.
template <int kBlocks>
__device__ uint64_t FindLast(Open<kBlocks>& open, int slot_bits, int key_bits, int wanted) {
  auto& shared = open.block.shared.select;
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
    open.ForEach([&](int slot, int32_t priority, bool is_open) {
      const uint64_t key = static_cast<uint64_t>(open.KeyOf(priority)) << slot_bits | static_cast<uint32_t>(slot);
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
    const Bin chosen = FindBin(shared, static_cast<int>(size), wanted);
    prefix = prefix << digit_bits | static_cast<uint64_t>(chosen.number);
    wanted -= chosen.before;
    if (wanted == chosen.size) return ((prefix + 1) << shift) - 1;
  }
}

// Sorts `size` pairs of scratch 0 by key, stably; returns where they end up.
template <int kBlocks>
__device__ int SortTaken(Block<kBlocks>& block, int size, int key_bits) {
  auto& shared = block.shared.select;
  const int segment = (size + kBlocks - 1) / kBlocks;
  const int run = ((segment + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int block_end = min((block.rank + 1) * segment, size);
  const int begin = min(block.rank * segment + Warp() * run, block_end), end = min(begin + run, block_end);
  int from = 0;
  for (int shift = 0; shift < key_bits; shift += 8, from ^= 1) {
    const uint32_t* keys = block.task.sort_keys[from];
    const int32_t* slots = block.task.sort_slots[from];
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
    uint32_t* sorted_keys = block.task.sort_keys[from ^ 1];
    int32_t* sorted_slots = block.task.sort_slots[from ^ 1];
    for_each([&](int at, int digit, unsigned lanes) {
      const int to = shared.digit_start[digit] + count(digit, lanes) + __popc(lanes & ((1u << Lane()) - 1));
      sorted_keys[to] = __ldcg(keys + at);
      sorted_slots[to] = __ldcg(slots + at);
    });
    ClusterSync();
  }
  return from;
}

// What is below a bound, key and slot together, is taken: `count` slots, `used` of them in use.
template <int kBlocks>
struct Bound {
  Open<kBlocks> open;
  int slot_bits;
  uint64_t last;
  int count;
  int used;

  __device__ uint64_t KeyOf(int slot, int32_t priority) const {
    return static_cast<uint64_t>(open.KeyOf(priority)) << slot_bits | static_cast<uint32_t>(slot);
  }
  __device__ bool Takes(int slot, int32_t priority, bool is_open) const { return is_open && KeyOf(slot, priority) <= last; }
};

// The bound of the `wanted` lowest slots, or of all that are not protected where they are fewer. Called by all blocks of a
// cluster together, keys and marks loaded, before any priority changes that is not protected.
template <int kBlocks>
__device__ Bound<kBlocks> FindBound(Block<kBlocks>& block, int wanted) {
  auto& shared = block.shared.select;
  Open<kBlocks> open(block);
  Range range{kNoKey, 0};
  int free = 0, used = 0;
  open.ForEach([&](int, int32_t priority, bool is_open) {
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
  open.only_free = free >= wanted;
  if (!open.only_free) open.low = static_cast<uint32_t>(range.low);
  const int slot_bits = Bits(static_cast<uint64_t>(max(block.task.device_slots - 1, 1)));
  const int key_bits = open.only_free ? 0 : Bits(range.high - range.low + 1);
  const uint64_t last = wanted > 0 ? FindLast(open, slot_bits, key_bits, wanted) : 0;
  return {open, slot_bits, last, wanted, wanted - min(wanted, free)};
}

// So many slots as there may be.
template <int kBlocks>
__device__ Taken SelectLowest(Block<kBlocks>& block, int wanted) {
  auto& shared = block.shared.select;
  const Bound<kBlocks> bound = FindBound(block, wanted);
  if (bound.count == 0) return {block.task.sort_slots[0], 0, 0};

  // The taken ones in order of slots.
  int in_run = 0;
  bound.open.ForEach([&](int slot, int32_t priority, bool is_open) {
    in_run += __popc(__ballot_sync(kAllLanes, bound.Takes(slot, priority, is_open)));
  });
  if (Lane() == 0) shared.totals[Warp()] = in_run;
  __syncthreads();
  const Prefix warps = PrefixOfWarps(shared.totals);
  if (threadIdx.x < kBlocks) *Remote(&shared.taken_of_blocks[block.rank], threadIdx.x) = warps.total;
  ClusterSync();
  int next = warps.before;
  for (int peer = 0; peer < block.rank; ++peer) next += shared.taken_of_blocks[peer];
  bound.open.ForEach([&](int slot, int32_t priority, bool is_open) {
    const bool takes = bound.Takes(slot, priority, is_open);
    const unsigned lanes = __ballot_sync(kAllLanes, takes);
    if (takes) {
      const int to = next + __popc(lanes & ((1u << Lane()) - 1));
      block.task.sort_keys[0][to] = bound.open.KeyOf(priority);
      block.task.sort_slots[0][to] = slot;
    }
    next += __popc(lanes);
  });
  ClusterSync();
  const int where = SortTaken(block, bound.count, Bits(bound.last >> bound.slot_bits));
  return {block.task.sort_slots[where], bound.count, bound.used};
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_SELECT_CUH_
