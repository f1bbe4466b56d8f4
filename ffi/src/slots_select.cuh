// The slots of lowest (priority, slot) among those that are not protected, by a cluster: a radix select over all slots, the
// taken ones in order of slots, and a stable radix sort of those by priority.
//
// Order keys. A priority becomes an unsigned number in the order of priorities. Of slots with the last key that is taken the
// first ones are. Where in the order of slots one comes is known once blocks have told how many each of their words has.
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
#pragma unroll 1
  for (int at = threadIdx.x * 4; at < block.places(); at += kThreads * 4) {
    const int32_t slot = block.SlotAt(at), left = block.task.device_slots - slot;
    if (left > 0) CopyAsync16(block.keys + at, block.task.priority + slot, min(left, 4) * 4);
  }
}

// The priorities of four of the block's slots; beyond the last slot they say nothing.
template <int kBlocks>
__device__ int4 FourOfSlots(const Block<kBlocks>& block, int at) {
  if (block.task.are_keys_shared) return *reinterpret_cast<const int4*>(block.keys + at);
  const int32_t slot = block.SlotAt(at), left = block.task.device_slots - slot;
  const int32_t* priority = block.task.priority + slot;
  if (left >= 4) return __ldcg(reinterpret_cast<const int4*>(priority));
  const auto key = [&](int i) { return i < left ? __ldcg(priority + i) : kProtected; };
  return int4{key(0), key(1), key(2), key(3)};
}

// use(at, four priorities) for this thread's part of the block's slots, four such loads under way.
template <int kBlocks, typename Use>
__device__ void ForEachFourOfSlots(const Block<kBlocks>& block, Use use) {
  constexpr int kLoads = 4, kApart = kThreads * 4;
  const int count = block.places();
#pragma unroll 1
  for (int first = threadIdx.x * 4; first < count; first += kLoads * kApart) {
    int4 keys[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int at = first + load * kApart;
      keys[load] = at < count ? FourOfSlots(block, at) : int4{kProtected, kProtected, kProtected, kProtected};
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (first + load * kApart < count) use(first + load * kApart, keys[load]);
    }
  }
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
};

// The slots of a block as (key, slot), a warp's words of 32 one after the other.
template <int kBlocks>
struct Open {
  Block<kBlocks>& block;
  uint32_t low;  // Ordered priority that becomes 1; a free slot is 0
  bool only_free;

  __device__ explicit Open(Block<kBlocks>& of_block) : block(of_block), low(0), only_free(false) {}

  // Every slot of the warp's words once: function(word, slot, priority, is there one to take). All lanes call it together.
  // Of the block's words those from `from` on, as far as `to`.
  template <typename Function>
  __device__ void ForEach(int from, int to, Function function) const {
    constexpr int kTogether = 4;  // loads under way
    const int run = (to - from + kWarps - 1) / kWarps, end = min(from + (Warp() + 1) * run, to);
#pragma unroll 1
    for (int first = from + Warp() * run; first < end; first += kTogether) {
      bool is_open[kTogether];
      int32_t priority[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = (first + i) * 32 + Lane();
        is_open[i] = first + i < end && !(block.is_protected[first + i] >> Lane() & 1);
        priority[i] = 0;
        if (!is_open[i]) continue;
        priority[i] = block.task.are_keys_shared ? block.keys[at] : __ldcg(block.task.priority + block.SlotAt(at));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= end) break;  // the next word is another warp's
        const int32_t slot = block.SlotAt((first + i) * 32 + Lane());
        function(first + i, slot, priority[i], is_open[i] && !(only_free && priority[i] != kFreePriority));
      }
    }
  }

  template <typename Function>
  __device__ void ForEach(Function function) const {
    ForEach(0, block.task.words, [&](int, int32_t, int32_t priority, bool is_open) { function(priority, is_open); });
  }

  __device__ uint32_t KeyOf(int32_t priority) const { return priority == kFreePriority ? 0 : Ordered(priority) - low + 1; }
};

// What is taken: slots of keys below `key`, and of those with it the first `ties`.
struct Last {
  uint32_t key;
  int ties;
};

// The last key of `wanted` slots, of which there are as many. Keys have so many bits.
template <int kBlocks>
__device__ Last FindLast(Open<kBlocks>& open, int key_bits, int wanted) {
  constexpr int kBinBits = 10;
  static_assert(kBins == 1 << kBinBits && kBins == kThreads);
  auto& shared = open.block.shared.select;
  uint32_t prefix = 0;
  for (int round = 0, shift = key_bits; shift > 0; ++round) {
    // The last round but one was read by everybody before the last round's barrier.
    uint32_t* histogram = shared.histogram[round & 1];
    const int above = shift;
    const int digit_bits = min(shift, kBinBits);
    shift -= digit_bits;
    histogram[threadIdx.x] = 0;
    __syncthreads();
    open.ForEach([&](int32_t priority, bool is_open) {
      const uint32_t key = open.KeyOf(priority);
      const bool counts = is_open && (round == 0 || key >> above == prefix);
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
    prefix = prefix << digit_bits | static_cast<uint32_t>(chosen.number);
    wanted -= chosen.before;
    // All of a bin: its highest key is the last, whether there is a slot that has it or not.
    if (wanted == chosen.size) return {static_cast<uint32_t>((uint64_t{prefix} + 1) << shift) - 1, INT32_MAX};
  }
  return {prefix, wanted};
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

// `count` slots of those that are open: up to `last`.
template <int kBlocks>
struct Bound {
  Open<kBlocks> open;
  Last last;
  int count;
};

// The bound of the `wanted` lowest slots, or of all that are not protected where they are fewer. Called by all blocks of a
// cluster together, keys and marks loaded, before any priority changes that is not protected.
template <int kBlocks>
__device__ Bound<kBlocks> FindBound(Block<kBlocks>& block, int wanted) {
  auto& shared = block.shared.select;
  Open<kBlocks> open(block);
  Range range{kNoKey, 0};
  int free = 0, used = 0;
  open.ForEach([&](int32_t priority, bool is_open) {
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
  const int key_bits = open.only_free ? 0 : Bits(range.high - range.low + 1);
  return {open, wanted > 0 ? FindLast(open, key_bits, wanted) : Last{0, 0}, wanted};
}

// So many slots as there may be.
template <int kBlocks>
__device__ Taken SelectLowest(Block<kBlocks>& block, int wanted) {
  auto& shared = block.shared.select;
  const Bound<kBlocks> bound = FindBound(block, wanted);
  if (bound.count == 0) return {block.task.sort_slots[0], 0};
  const Open<kBlocks>& open = bound.open;
  const uint32_t last = bound.last.key;

  // The taken ones in order of slots, so many words of each block at a time: a thread a word.
  int below_in_all = 0, ties_in_all = 0;
#pragma unroll 1
  for (int from = 0, round = 0; from < block.task.words; from += kThreads, ++round) {
    const int to = min(from + kThreads, block.task.words);
    uint32_t* of_words = shared.of_words[round & 1];  // the others read those of the round before
    of_words[threadIdx.x] = 0;
    __syncthreads();
    open.ForEach(from, to, [&](int word, int32_t, int32_t priority, bool is_open) {
      const uint32_t key = open.KeyOf(priority);
      const int below = __popc(__ballot_sync(kAllLanes, is_open && key < last));
      const int ties = __popc(__ballot_sync(kAllLanes, is_open && key == last));
      if (Lane() == 0) of_words[word - from] = static_cast<uint32_t>(below | ties << 16);
    });
    ClusterSync();
    uint32_t of_all = 0, of_blocks_before = 0;
#pragma unroll 4
    for (int peer = 0; peer < kBlocks; ++peer) {
      const uint32_t theirs = *Remote(&of_words[threadIdx.x], peer);
      of_blocks_before += peer < block.rank ? theirs : 0;
      of_all += theirs;
    }
    const Prefix below = BlockSum(static_cast<int>(of_all & 0xffff), shared.totals);
    __syncthreads();
    const Prefix ties = BlockSum(static_cast<int>(of_all >> 16), shared.totals);
    shared.below_before[threadIdx.x] = below_in_all + below.before + static_cast<int>(of_blocks_before & 0xffff);
    shared.ties_before[threadIdx.x] = ties_in_all + ties.before + static_cast<int>(of_blocks_before >> 16);
    below_in_all += below.total;
    ties_in_all += ties.total;
    __syncthreads();
    open.ForEach(from, to, [&](int word, int32_t slot, int32_t priority, bool is_open) {
      const uint32_t key = open.KeyOf(priority);
      const bool is_below = is_open && key < last, is_tied = is_open && key == last;
      const unsigned lanes_before = (1u << Lane()) - 1;
      const unsigned below_lanes = __ballot_sync(kAllLanes, is_below), tied_lanes = __ballot_sync(kAllLanes, is_tied);
      const int ties_before = shared.ties_before[word - from] + __popc(tied_lanes & lanes_before);
      if (!is_below && !(is_tied && ties_before < bound.last.ties)) return;
      const int place = shared.below_before[word - from] + __popc(below_lanes & lanes_before) +
                        min(ties_before, bound.last.ties);
      block.task.sort_keys[0][place] = key;
      block.task.sort_slots[0][place] = slot;
    });
  }
  ClusterSync();
  const int where = SortTaken(block, bound.count, Bits(last));
  return {block.task.sort_slots[where], bound.count};
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_SELECT_CUH_
