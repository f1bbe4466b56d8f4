// How missing rows get slots. Knows the entries as the look left them in Block::seen.
//
//   Share    every block tells its lowest samples; nobody waits for them yet
//   Rank     the entries of missing rows read who was first; firsts are counted in list order; later mentions hand their
//            priority to the first; staged rows find the first mention of their row.
//   -------- barrier: all samples were told
//   Collect  the bound of the lowest slots is guessed, and what lies below it goes to every block, with how many firsts
//            this one has
//   -------- barrier
//   Choose   the collected slots are ranked.
//   -------- barrier
//   Finish   firsts take the slot of their rank, write all maps and the fills; later mentions read the first's rank.
//
// Where one row is missing, as in most layers of a decode step of one seat, the lowest slot of each block is what is told,
// there is one barrier, and Finish comes next. Where too many are missing for a guess, or it was a bad one, SelectLowest goes
// through all slots before Finish.
#ifndef ECHO_FFI_SLOTS_SETTLE_CUH_
#define ECHO_FFI_SLOTS_SETTLE_CUH_

#include <cstdint>

#include "echo_ffi/targets.h"
#include "slots_guess.cuh"
#include "slots_select.cuh"

namespace echo_ffi {

// ---- Rank --------------------------------------------------------------------------------------------------------------

// What is wanted of 32 entries of a warp's run, one a lane.
struct Wanted {
  int32_t seen;   // NO_SLOT beyond the run
  bool is_first;  // to mention a missing row, once markers are read
  bool is_new;

  template <int kBlocks>
  __device__ Wanted(const Block<kBlocks>& block, int m)
      : seen(m < block.run_end ? block.seen[m - block.begin] : kNoSlot),
        is_first(seen < kNoSlot && seen == block.task.MarkerOf(m)),
        is_new(seen != kNoSlot && block.IsNew(m)) {}

  // Whether none of the warp's lanes wants anything.
  __device__ bool IsNothing() const { return __ballot_sync(kAllLanes, seen < kNoSlot || is_new) == 0; }
};

// Counts the block's firsts and its fills by warp. Leaves shared.warp_first and warp_fill in use.
template <int kBlocks>
__device__ void Rank(Block<kBlocks>& block) {
  auto& shared = block.shared;
  const AllocateTask& task = block.task;
  int first_in_warp = 0, fill_in_warp = 0;
#pragma unroll 1
  for (int round = block.run_begin; round < block.run_end; round += 32) {
    const int m = round + Lane();
    const Wanted wanted(block, m);
    if (wanted.IsNothing()) continue;
    const bool is_missing = wanted.seen < kNoSlot;
    const int32_t marker = is_missing ? __ldcg(task.slot_of + __ldcg(task.row() + m)) : kNoSlot;
    const bool is_first = is_missing && marker == task.MarkerOf(m);
    if (is_missing) {
      block.seen[m - block.begin] = marker;
      if (!is_first) atomicMax(task.best() + task.MentionOf(marker), Clamped(task.Touched(m)));
    }
    first_in_warp += __popc(__ballot_sync(kAllLanes, is_first));
    fill_in_warp += __popc(__ballot_sync(kAllLanes, is_first || wanted.is_new));
  }
  if (Lane() == 0) {
    shared.warp_first[Warp()] = first_in_warp;
    shared.warp_fill[Warp()] = fill_in_warp;
  }
  __syncthreads();
  if (first_in_warp == 0) return;
  int next = PrefixOfWarps(shared.warp_first).before;
#pragma unroll 1
  for (int round = block.run_begin; round < block.run_end; round += 32) {
    const int m = round + Lane();
    const bool is_first = Wanted(block, m).is_first;
    const unsigned lanes = __ballot_sync(kAllLanes, is_first);
    if (is_first) task.order()[m] = next + __popc(lanes & ((1u << Lane()) - 1));
    next += __popc(lanes);
  }
}

// Staged rows find the first mention of their row, wherever it is.
template <int kBlocks>
__device__ void FindStaged(const Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
#pragma unroll 1
  for (int e = block.rank * kThreads + threadIdx.x; e < task.staged_length; e += kBlocks * kThreads) {
    const int32_t row = task.staged[e];
    if (!block.IsRow(row)) continue;
    const int32_t marker = __ldcg(task.slot_of + row);
    if (marker < kNoSlot) atomicMin(task.place() + task.MentionOf(marker), e);
  }
}

// ---- Finish ------------------------------------------------------------------------------------------------------------

// Whether a row had to leave the slot.
template <int kBlocks>
__device__ bool TakeSlot(Block<kBlocks>& block, int32_t row, int32_t slot, int32_t priority) {
  const AllocateTask& task = block.task;
  task.slot_of[row] = slot;
  if (slot == kNoSlot) return false;  // more rows than slots: the caller broke the promise; the row stays where it is
  const int32_t victim = __ldcg(task.host_of + slot);
  if (block.IsRow(victim)) task.slot_of[victim] = kNoSlot;
  task.host_of[slot] = row;
  task.free[slot] = false;
  task.priority[slot] = priority;
  return block.IsRow(victim);
}

// slot_of_rank(rank) is the slot of the missing row of that rank. Who fills what is known of every block and warp.
template <int kBlocks, typename SlotOfRank>
__device__ void Finish(Block<kBlocks>& block, SlotOfRank slot_of_rank) {
  auto& shared = block.shared;
  const AllocateTask& task = block.task;
  int next_first = shared.first_before[block.rank] + PrefixOfWarps(shared.warp_first).before;
  int next_fill = shared.fill_before + PrefixOfWarps(shared.warp_fill).before;
  const int new_rows = task.count_of_new();
  int useful = 0, recalled = 0, evicted = 0;
#pragma unroll 1
  for (int round = block.run_begin; round < block.run_end; round += 32) {
    const int m = round + Lane();
    const Wanted wanted(block, m);
    if (wanted.IsNothing()) continue;
    const bool is_filled = wanted.is_first || wanted.is_new;
    const unsigned firsts = __ballot_sync(kAllLanes, wanted.is_first), filled = __ballot_sync(kAllLanes, is_filled);
    const unsigned below = (1u << Lane()) - 1;
    // Together, and before any of them is waited for.
    const int32_t row = is_filled ? __ldcg(task.row() + m) : kNoRow;
    const int32_t best = wanted.is_first ? __ldcg(task.best() + m) : 0;
    const int32_t place = wanted.is_first ? __ldcg(task.place() + m) : INT32_MAX;
    int32_t slot = wanted.seen;
    if (wanted.is_first) {
      slot = slot_of_rank(next_first + __popc(firsts & below));
      evicted += TakeSlot(block, row, slot, best);
    } else if (wanted.seen < kNoSlot) {
      const int first = task.MentionOf(wanted.seen);
      slot = slot_of_rank(shared.first_before[task.by_segment.Of(first)] + __ldcg(task.order() + first));
    }
    if (wanted.seen < kNoSlot) task.GiveSlot(m, slot);
    if (is_filled) {
      int32_t source = kSourceHost;
      if (wanted.is_new) {
        source = Entry(task, m).AmongNew();
      } else if (place != INT32_MAX) {
        source = new_rows + place;
        ++useful;
      } else {
        ++recalled;
      }
      const int to = next_fill + __popc(filled & below);
      task.fill_rows[to] = row;
      task.fill_slots[to] = slot;
      task.fill_mention[to] = m;
      task.fill_source[to] = source;
    }
    next_first += __popc(firsts);
    next_fill += __popc(filled);
  }
  useful = __reduce_add_sync(kAllLanes, useful);
  recalled = __reduce_add_sync(kAllLanes, recalled);
  evicted = __reduce_add_sync(kAllLanes, evicted);
  if (Lane() == 0) {
    if (useful > 0) atomicAdd(task.counts[kUseful], useful);
    if (recalled > 0) atomicAdd(task.counts[kRecalled], recalled);
    if (evicted > 0) atomicAdd(task.counts[kEvicted], evicted);
  }
  if (threadIdx.x == 0 && shared.fills > 0) atomicAdd(task.counts[kToFill], shared.fills);
}

// ---- all of it ---------------------------------------------------------------------------------------------------------

// Of what every block told: the firsts before each block, and the fills before this one. Returns all firsts. There for the
// block after its next barrier.
template <int kBlocks>
__device__ int CountBefore(Block<kBlocks>& block) {
  auto& shared = block.shared;
  const int firsts = Lane() < kBlocks ? shared.first_of_blocks[Lane()] : 0;
  const int fills = Lane() < kBlocks ? shared.fill_of_blocks[Lane()] : 0;
  const int first_before = WarpInclusiveSum(firsts) - firsts;
  if (threadIdx.x < kBlocks) shared.first_before[threadIdx.x] = first_before;
  const int fill_before = __reduce_add_sync(kAllLanes, Lane() < block.rank ? fills : 0);
  if (threadIdx.x == block.rank) {
    shared.fill_before = fill_before;
    shared.fills = fills;
  }
  return __reduce_add_sync(kAllLanes, firsts);
}

// Every block's firsts and fills to every other.
template <int kBlocks>
__device__ void TellCounts(Block<kBlocks>& block) {
  auto& shared = block.shared;
  if (Warp() != kWarps - 1) return;
  const int firsts = __reduce_add_sync(kAllLanes, shared.warp_first[Lane()]);
  const int fills = __reduce_add_sync(kAllLanes, shared.warp_fill[Lane()]);
  if (Lane() >= kBlocks) return;
  *Remote(&shared.first_of_blocks[block.rank], Lane()) = firsts;
  *Remote(&shared.fill_of_blocks[block.rank], Lane()) = fills;
}

__device__ inline void WaitForKeys() {
  WaitForCopies();
  __syncthreads();
}

// `missing` mentions of rows that have no slot, at least one. Marks are there, and keys on their way; the cluster's blocks
// have arrived where the look was apart, and nobody has waited.
template <int kBlocks>
__device__ void Settle(Block<kBlocks>& block, int missing, const Samples<kBlocks>& samples) {
  auto& shared = block.shared;
  const bool is_single = missing == 1, is_guessed = !is_single && IsGuessed<kBlocks>(missing, block.task.device_slots);
  if (block.task.is_look_apart) ClusterWait();
  if (is_single) {
    WaitForKeys();
    ShareLowest(block);
  }
  if (is_guessed) {
    ShareLows(block, samples);
    ClusterArrive();
  }
  ECHO_PHASE(Shared);
  Rank(block);
  FindStaged(block);
  if (!is_single) WaitForKeys();
  ECHO_PHASE(Ranked);
  if (is_guessed) {
    ClusterWait();
    ECHO_PHASE(AllShared);
    Collect(block, missing);
    ECHO_PHASE(Collected);
  }
  TellCounts(block);
  ClusterSync();
  ECHO_PHASE(AllTold);
  const int rows = CountBefore(block);
  if (is_single) {
    const uint64_t lowest = LowestOfBlocks(block);
    __syncthreads();
    Finish(block, [lowest](int) { return lowest == kNoKey ? kNoSlot : static_cast<int32_t>(lowest & 0xffffffffu); });
    ECHO_PHASE(Finished);
    return;
  }
  bool is_enough = false;
  if (is_guessed) {
    is_enough = AreEnough(block, rows);
    if (is_enough) RankCandidates(block, rows);
    ECHO_PHASE(Chosen);
    ClusterSync();  // the choice is there; or, where all slots are gone through, every block has read why
    ECHO_PHASE(AllChosen);
  }
  if (is_enough) {
    Finish(block, [&](int rank) { return shared.guess.taken[rank]; });
  } else {
    const Taken taken = SelectLowest(block, rows);
    ECHO_PHASE(Selected);
    Finish(block, [&](int rank) { return rank < taken.count ? __ldcg(taken.slots + rank) : kNoSlot; });
  }
  ECHO_PHASE(Finished);
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_SETTLE_CUH_
