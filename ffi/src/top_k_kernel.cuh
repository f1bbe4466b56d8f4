// echo_top_k and echo_bounded_top_k on a GPU: a cluster of blocks selects from one row, each block its own part of it.
// What they mean, in jnp, is indexer._select_by_order.
//
//   bracket    a bound that the caller gives, or one from a small sample: a key with somewhat more than k above it
//   collect    one pass over the row lists the keys above the bracket and counts those that equal it; or one over the
//              caller's marks does, which reads no other score
//   find       the k-th key: among the listed ones, or the bracket itself where many keys are equal
//   emit       what is selected becomes bits in order of position, and the bits a list
//
// A bound may be bad, a sample unlucky, and somebody's scores made to fool it: then too few or too many keys are
// listed. Where a bound misled, a sample is taken; where a sample did, the k-th key is searched for in the row itself,
// a few passes, and emit reads the row once more. The answer is exact on every path and does not depend on the order in
// which threads append to the list.
//
// Reading 131,072 floats takes well under a microsecond a row; what bounds this kernel is the number of times its
// threads meet. So the sample is small, counting needs no lock step, and blocks of a cluster meet twice.
#ifndef ECHO_FFI_TOP_K_KERNEL_CUH_
#define ECHO_FFI_TOP_K_KERNEL_CUH_

#include <cstdint>

#include "cluster.cuh"
#include "echo_ffi/order.h"
#include "find_kth.cuh"
#include "row_scores.cuh"
#include "top_k_list.cuh"

namespace echo_ffi::top_k {

constexpr uint32_t kMaxTopK = 4096;
constexpr uint32_t kWordsPerThread = kWindowWords / kThreads;
static_assert(kWordsPerThread == 4, "Emit reads its words as one uint4");

// Adds a thread's counts up into *sum, which all threads may read when they have met.
__device__ inline void AddUp(Counts mine, Counts* sum) {
  mine.above = __reduce_add_sync(kAllLanes, mine.above);
  mine.ties = __reduce_add_sync(kAllLanes, mine.ties);
  if (threadIdx.x % kLanes == 0) {
    if (mine.above != 0) atomicAdd(&sum->above, mine.above);
    if (mine.ties != 0) atomicAdd(&sum->ties, mine.ties);
  }
}

// What the blocks of the cluster have counted, a lane for each block.
struct Theirs {
  Counts counts;
  uint32_t highest;
  uint32_t lowest;

  __device__ Counts SumOfFirst(uint32_t blocks) const {
    const bool is_in = threadIdx.x % kLanes < blocks;
    const Counts mine = is_in ? counts : Counts{0, 0};
    return {__reduce_add_sync(kAllLanes, mine.above), __reduce_add_sync(kAllLanes, mine.ties)};
  }
  // Of the listed keys, of which there must be some.
  __device__ KeyRange Range() const {
    const uint32_t low = __reduce_min_sync(kAllLanes, lowest) - 1;
    return {low, __reduce_max_sync(kAllLanes, highest) - low - 1};
  }
};

__device__ inline Theirs ReadCounts(Shared& shared, uint32_t blocks) {
  const uint32_t block = threadIdx.x % kLanes;
  if (block >= blocks) return {{0, 0}, 0, ~0u};
  return {*Remote(&shared.counts, block), *Remote(&shared.highest, block), *Remote(&shared.lowest, block)};
}

// The keys of the whole row. Each block counts those of its own segment, and all blocks get all counts.
template <typename Bits>
struct KeysOfRow {
  static constexpr bool kListsFew = false;

  Shared& shared;
  const Row<Bits>& row;
  Segment segment;
  uint32_t blocks;

  __device__ TwoBins Count(KeyRange range, uint32_t shift) const {
    row.ForEachBatch(segment, [&](const uint32_t(&keys)[kBatch], uint32_t visible, uint32_t) {
#pragma unroll
      for (uint32_t e = 0; e < kBatch; ++e) {
        if ((visible >> e & 1) != 0 && range.Has(keys[e])) {
          atomicAdd(&shared.scratch.histogram[range.Bin(keys[e], shift)], 1u);
        }
      }
    });
    ClusterSync();  // every histogram is complete
    const uint32_t upper = kBins - 1 - 2 * threadIdx.x;
    TwoBins sum = {0, 0};
    for (uint32_t block = 0; block < blocks; ++block) {
      const uint32_t* histogram = Remote(shared.scratch.histogram, block);
      sum.upper += histogram[upper];
      sum.lower += histogram[upper - 1];
    }
    ClusterSync();  // and has been read
    shared.scratch.TakeBins();
    return sum;
  }
};

// Lists the selected positions of one segment: those marked `above`, and the first of those marked as ties, of which
// `ties` are selected in all. mark(start) sets the bits of the places start .. start + kWindow of the segment. What lies
// before it is in shared.before by the time all threads have marked their first window.
template <typename Mark>
__device__ void Emit(Shared& shared, uint32_t places, int32_t position_of_place_0, uint32_t ties, int32_t* positions,
                     Mark mark) {
  Counts before = {0, 0};
  for (uint32_t start = 0; start < places; start += kWindow) {
    mark(start);
    __syncthreads();
    if (start == 0) before = shared.before;
    uint4 above, tied;
    shared.bits.Take(&above, &tied);
    uint32_t selected[kWordsPerThread] = {above.x, above.y, above.z, above.w};
    uint32_t tie[kWordsPerThread] = {tied.x, tied.y, tied.z, tied.w};
    unsigned long long mine = 0;  // ties in the upper half, so that one scan does for both
#pragma unroll
    for (uint32_t w = 0; w < kWordsPerThread; ++w) {
      mine += static_cast<unsigned long long>(__popc(tie[w])) << 32 | static_cast<uint32_t>(__popc(selected[w]));
    }
    unsigned long long all;
    const auto earlier = ExclusiveScan<unsigned long long>(shared.scratch, mine, &all);
    const uint32_t ties_before = min(before.ties + static_cast<uint32_t>(earlier >> 32), ties);
    uint32_t left = ties - ties_before;
    int32_t* out = positions + before.above + static_cast<uint32_t>(earlier) + ties_before;
#pragma unroll
    for (uint32_t w = 0; w < kWordsPerThread; ++w) {
      // The lower positions come first.
      while (static_cast<uint32_t>(__popc(tie[w])) > left) tie[w] &= ~(1u << (31 - __clz(tie[w])));
      left -= __popc(tie[w]);
      selected[w] |= tie[w];
      const uint32_t place = start + (threadIdx.x * kWordsPerThread + w) * 32;
      const int32_t position = position_of_place_0 + static_cast<int32_t>(place);
      for (uint32_t bits = selected[w]; bits != 0; bits &= bits - 1) *out++ = position + __ffs(bits) - 1;
    }
    before.above += static_cast<uint32_t>(all);
    before.ties += static_cast<uint32_t>(all >> 32);
  }
}

// All of a row that has no more than k visible scores.
template <typename Bits>
__device__ void SelectAll(Shared& shared, const Row<Bits>& row, uint32_t visible, uint32_t k, int32_t* positions,
                          uint32_t* kth_bits) {
  if (threadIdx.x == 0) shared.highest = 0;
  __syncthreads();
  uint32_t lowest = ~0u;
  for (uint32_t i = threadIdx.x; i < k; i += kThreads) {
    if (i < visible) lowest = min(lowest, row.KeyAt(i));
    positions[i] = i < visible ? static_cast<int32_t>(i) : -1;
  }
  // The complement, so that the zero above is the neutral element.
  const uint32_t complement = __reduce_max_sync(kAllLanes, ~lowest);
  if (threadIdx.x % kLanes == 0) atomicMax(&shared.highest, complement);
  __syncthreads();
  if (threadIdx.x == 0) *kth_bits = ScoreBits(visible == 0 ? 0 : ~shared.highest);
}

// Where the lists of the cluster hold all keys above the bracket, at least k: every block gathers them and finds the
// same k-th. What lies before the block's segment is on its way to shared.before.
__device__ inline Kth FindAmongListed(Shared& shared, const Theirs& theirs, uint32_t k, uint32_t blocks) {
  // A warp copies from one block, so that all are copied from at once, and counts what it copies.
  const uint32_t warp = threadIdx.x / kLanes, other = warp % blocks;
  const uint32_t warps = (kWarps - 1 - other) / blocks + 1;  // that copy from the same
  const uint32_t start = theirs.SumOfFirst(other).above;
  const uint32_t length = __shfl_sync(kAllLanes, theirs.counts.above, other);
  const KeyRange range = theirs.Range();
  const uint32_t shift = range.Shift();
  const uint32_t* keys = Remote(shared.keys, other);
  for (uint32_t i = warp / blocks * kLanes + threadIdx.x % kLanes; i < length; i += warps * kLanes) {
    const uint32_t key = keys[i];
    shared.gathered[start + i] = key;
    atomicAdd(&shared.scratch.histogram[range.Bin(key, shift)], 1u);
  }
  ClusterArrive();  // this block reads no other's memory from here on
  const uint32_t all = theirs.SumOfFirst(blocks).above, before = theirs.SumOfFirst(BlockOfCluster()).above;
  const Kth kth = FindKth(shared.scratch, range, k, ListedKeys{shared.scratch, shared.gathered, all, true});
  Counts mine = {0, 0};
  for (uint32_t i = threadIdx.x; i < before; i += kThreads) {
    mine.above += shared.gathered[i] > kth.key;
    mine.ties += shared.gathered[i] == kth.key;
  }
  AddUp(mine, &shared.before);
  return kth;
}

// Where the sample has misled: the rank-th largest of the row's keys in `range`, the row read a few times more.
template <typename Bits>
__device__ Kth FindInRow(Shared& shared, const Row<Bits>& row, Segment segment, KeyRange range, uint32_t rank,
                         uint32_t blocks) {
  const Kth kth = FindKth(shared.scratch, range, rank, KeysOfRow<Bits>{shared, row, segment, blocks});
  if (threadIdx.x == 0) shared.counts = {0, 0};
  __syncthreads();
  Counts mine = {0, 0};
  row.ForEachBatch(segment, [&](const uint32_t(&keys)[kBatch], uint32_t visible, uint32_t) {
#pragma unroll
    for (uint32_t e = 0; e < kBatch; ++e) {
      mine.above += visible >> e & static_cast<uint32_t>(keys[e] > kth.key);
      mine.ties += visible >> e & static_cast<uint32_t>(keys[e] == kth.key);
    }
  });
  AddUp(mine, &shared.counts);
  ClusterSync();
  const Counts before = ReadCounts(shared, blocks).SumOfFirst(BlockOfCluster());
  if (threadIdx.x == 0) shared.before = before;
  ClusterArrive();  // this block reads no other's memory from here on
  return kth;
}

// Lists the selected positions of a segment from its list of keys.
__device__ inline void EmitListed(Shared& shared, uint32_t places, int32_t position_of_place_0, Kth kth,
                                  int32_t* positions) {
  const uint32_t length = shared.counts.above;
  Emit(shared, places, position_of_place_0, kth.ties, positions, [&](uint32_t start) {
    for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
      const uint32_t key = shared.keys[i], place = shared.places[i] - start;
      if (key < kth.key || place >= kWindow) continue;
      atomicOr((key > kth.key ? shared.bits.above : shared.bits.ties) + place / 32, 1u << (place % 32));
    }
  });
}

// The same from the row itself.
template <typename Bits>
__device__ void EmitFromRow(Shared& shared, const Row<Bits>& row, Segment segment, int32_t position_of_place_0,
                            Kth kth, int32_t* positions) {
  constexpr uint32_t kPerVector = Row<Bits>::kPerVector;
  const uint32_t places = (segment.last - segment.first) * kPerVector;
  Emit(shared, places, position_of_place_0, kth.ties, positions, [&](uint32_t start) {
    const uint32_t first = segment.first + start / kPerVector;
    const Segment window = {first, min(first + kWindow / kPerVector, segment.last)};
    row.ForEachBatch(window, [&](const uint32_t(&keys)[kBatch], uint32_t visible_keys, uint32_t vector) {
#pragma unroll
      for (uint32_t e = 0; e < kBatch; ++e) {
        if ((visible_keys >> e & 1) == 0 || keys[e] < kth.key) continue;
        const uint32_t place = Row<Bits>::PlaceIn(vector - first, e);
        atomicOr((keys[e] > kth.key ? shared.bits.above : shared.bits.ties) + place / 32, 1u << (place % 32));
      }
    });
  });
}

// The k-th score, by the first block; no block leaves while another may read its memory.
__device__ inline void Finish(Kth kth, uint32_t* kth_bits) {
  if (BlockOfCluster() == 0 && threadIdx.x == 0) *kth_bits = ScoreBits(kth.key);
  __syncwarp();
  ClusterWait();
}

// The k best of one row's `visible` scores where the caller's marks list them: false, and nothing written, where too
// few or too many positions are marked, or fewer than k of them exceed the bound, which what is not marked does not.
template <typename Bits>
__device__ bool SelectFromMarked(Shared& shared, const Row<Bits>& row, Hint hint, uint32_t visible, uint32_t k,
                                 uint32_t blocks, int32_t* positions, uint32_t* kth_bits) {
  const uint32_t words = (visible + 31) / 32, each = (words + blocks - 1) / blocks, block = BlockOfCluster();
  const Segment segment = {min(block * each, words), min((block + 1) * each, words)};
  CollectMarked(shared, row, hint.above, segment, visible);
  ClusterSync();  // all lists and counts are complete
  const Theirs theirs = ReadCounts(shared, blocks);
  const uint32_t all = theirs.SumOfFirst(blocks).above;
  if (all < k || all > kCapacity) {
    ClusterSync();  // the counts have been read, and others may take their place
    return false;
  }
  const Kth kth = FindAmongListed(shared, theirs, k, blocks);
  if (kth.key <= hint.bound) {
    __syncthreads();  // shared.before has been added to, and will be cleared
    ClusterWait();
    return false;
  }
  EmitListed(shared, (segment.last - segment.first) * 32, static_cast<int32_t>(segment.first * 32), kth, positions);
  Finish(kth, kth_bits);
  return true;
}

// The k best of one row's `visible` scores, by a cluster of so many blocks (up to 8).
template <typename Bits>
__device__ void SelectFromRow(Shared& shared, const Bits* scores, uint32_t visible, uint32_t k, Hint hint,
                              uint32_t blocks, int32_t* positions, uint32_t* kth_bits) {
  const uint32_t block = BlockOfCluster();
  const Row<Bits> row(scores, visible);
  if (visible <= k) {
    if (block == 0) SelectAll(shared, row, visible, k, positions, kth_bits);
    return;  // the whole cluster: nobody waits
  }
  shared.scratch.ClearHistogram();
  shared.bits.Clear();
  if (hint.above != nullptr) {
    if (SelectFromMarked(shared, row, hint, visible, k, blocks, positions, kth_bits)) return;
    hint.bound = 0;  // what misled those who marked would mislead here
  }

  const Segment segment = row.Part(block, blocks);
  bool is_bounded = hint.bound != 0 && visible > kCapacity;
  if (!is_bounded) row.Prefetch(segment);
  uint32_t bracket;
  Theirs theirs;
  Counts all;
  for (;; is_bounded = false) {
    bracket = is_bounded ? hint.bound : Bracket(shared, row, visible, k);
    Collect(shared, row, segment, bracket);
    ClusterSync();  // all lists and counts are complete
    theirs = ReadCounts(shared, blocks);
    all = theirs.SumOfFirst(blocks);
    if (!is_bounded || (all.above <= kCapacity && k <= all.above + all.ties)) break;
    ClusterSync();  // the counts have been read, and others may take their place
  }

  const bool is_listed = k <= all.above && all.above <= kCapacity;
  Kth kth;
  if (is_listed) {
    kth = FindAmongListed(shared, theirs, k, blocks);
  } else if (all.above < k && k <= all.above + all.ties) {
    kth = {bracket, k - all.above};
    const Counts before = theirs.SumOfFirst(block);
    if (threadIdx.x == 0) shared.before = before;
    ClusterArrive();
  } else if (all.above >= k) {
    kth = FindInRow(shared, row, segment, theirs.Range(), k, blocks);
  } else {
    // Below the bracket, which is no NaN's key then: nothing would be below that.
    kth = FindInRow(shared, row, segment, KeyRange{0, bracket - 2}, k - all.above - all.ties, blocks);
  }

  constexpr uint32_t kPerVector = Row<Bits>::kPerVector;
  const int32_t position_of_place_0 =
      static_cast<int32_t>(segment.first * kPerVector) - static_cast<int32_t>(row.Begin());
  if (is_listed) {
    EmitListed(shared, (segment.last - segment.first) * kPerVector, position_of_place_0, kth, positions);
  } else {
    EmitFromRow(shared, row, segment, position_of_place_0, kth, positions);
  }
  Finish(kth, kth_bits);
}

}  // namespace echo_ffi::top_k

#endif  // ECHO_FFI_TOP_K_KERNEL_CUH_
