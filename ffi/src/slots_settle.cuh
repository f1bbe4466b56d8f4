// How missing rows get slots. Knows the entries as the look left them in Block::seen.
//
//   Rank     entries that want a slot or are filled are listed; those of missing rows read who was first; firsts are counted in
//            list order; later mentions hand their priority to the first; staged rows find the first mention of their row.
//   -------- barrier: how many firsts each block has, and the lowest samples of all
//   Collect  the bound of the lowest slots is guessed, and what lies below it goes to every block
//   -------- barrier
//   Choose   the collected slots are ranked.
//   -------- barrier
//   Finish   firsts take the slot of their rank, write all maps and the fills; later mentions read the first's rank.
//
// Where one row is missing, as in most layers of a decode step of one seat, the lowest slot of each block is what is told at
// the first barrier, and Finish comes next. Where too many are missing for a guess, or it was a bad one, SelectLowest goes
// through all slots before Finish.
#ifndef ECHO_FFI_SLOTS_SETTLE_CUH_
#define ECHO_FFI_SLOTS_SETTLE_CUH_

#include <cstdint>

#include "echo_ffi/targets.h"
#include "slots_guess.cuh"
#include "slots_select.cuh"

namespace echo_ffi {

// ---- Rank --------------------------------------------------------------------------------------------------------------

// Lists the block's entries that want a slot or are filled, so that each has a thread, wherever they stand; how many.
template <int kBlocks>
__device__ int ListWanted(Block<kBlocks>& block) {
  int32_t* totals = block.shared.totals;
  const auto is_wanted = [&](int m) {
    const int32_t seen = m < block.run_end ? block.seen[m - block.begin] : kNoSlot;
    return seen < kNoSlot || (seen != kNoSlot && block.IsNew(m));
  };
  int in_warp = 0;
#pragma unroll 1
  for (int round = block.run_begin; round < block.run_end; round += 32) {
    in_warp += __popc(__ballot_sync(kAllLanes, is_wanted(round + Lane())));
  }
  if (Lane() == 0) totals[Warp()] = in_warp;
  __syncthreads();
  const Prefix prefix = PrefixOfWarps(totals);
  if (in_warp > 0) {
    int next = prefix.before;
#pragma unroll 1
    for (int round = block.run_begin; round < block.run_end; round += 32) {
      const bool is_one = is_wanted(round + Lane());
      const unsigned lanes = __ballot_sync(kAllLanes, is_one);
      if (is_one) block.wanted[next + __popc(lanes & ((1u << Lane()) - 1))] = round + Lane();
      next += __popc(lanes);
    }
  }
  __syncthreads();
  return prefix.total;
}

// First mentions and entries to fill: of the threads before this one, or of all.
struct Ranks {
  int firsts, fills;
};

// Counted together, at most kThreads of each.
__device__ inline Prefix CountBoth(bool is_first, bool is_filled, int* totals) {
  static_assert(kThreads < 1 << 15, "both fit one number");
  return BlockSum(static_cast<int>(is_first) | static_cast<int>(is_filled) << 16, totals);
}
__device__ inline Ranks RanksOf(int both) { return {both & 0xffff, both >> 16}; }

// The `count` wanted entries of missing rows read who was first. How many firsts there are, and how many entries to fill.
template <int kBlocks>
__device__ Ranks Rank(Block<kBlocks>& block, int count) {
  const AllocateTask& task = block.task;
  Ranks all{0, 0};
#pragma unroll 1
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const bool is_there = i < count;
    const int m = is_there ? block.wanted[i] : 0;
    bool is_first = false;
    if (is_there && block.seen[m - block.begin] < kNoSlot) {
      const int32_t marker = __ldcg(task.slot_of + __ldcg(task.row() + m));
      block.seen[m - block.begin] = marker;
      is_first = marker == task.MarkerOf(m);
      if (!is_first) atomicMax(task.best() + task.MentionOf(marker), Clamped(task.touched[m]));
    }
    const Prefix prefix = CountBoth(is_first, is_there && (is_first || block.IsNew(m)), block.shared.totals);
    const Ranks total = RanksOf(prefix.total);
    if (is_first) task.order()[m] = all.firsts + RanksOf(prefix.before).firsts;
    all = {all.firsts + total.firsts, all.fills + total.fills};
    __syncthreads();  // the totals have been read
  }
  return all;
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

// slot_of_rank(rank) is the slot of the missing row of that rank. Of the block's `count` wanted entries, whose markers are
// read; what other blocks fill and take before is known.
template <int kBlocks, typename SlotOfRank>
__device__ void Finish(Block<kBlocks>& block, int count, SlotOfRank slot_of_rank) {
  auto& shared = block.shared;
  const AllocateTask& task = block.task;
  Ranks before{shared.first_before[block.rank], shared.fill_before};
  const int new_rows = task.length / task.per_seat * task.new_per_seat;
  int useful = 0, recalled = 0, evicted = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const bool is_there = i < count;
    const int m = is_there ? block.wanted[i] : 0;
    const int32_t seen = is_there ? block.seen[m - block.begin] : kNoSlot;
    const bool is_first = seen < kNoSlot && seen == task.MarkerOf(m), is_new = is_there && block.IsNew(m);
    const bool is_filled = is_first || is_new;
    // On their way while the block counts.
    const int32_t row = is_filled ? __ldcg(task.row() + m) : kNoRow;
    const int32_t best = is_first ? __ldcg(task.best() + m) : 0;
    const int32_t place = is_first ? __ldcg(task.place() + m) : INT32_MAX;
    const Prefix prefix = CountBoth(is_first, is_filled, shared.totals);
    const Ranks own = RanksOf(prefix.before), total = RanksOf(prefix.total);
    int32_t slot = seen;
    if (is_first) {
      slot = slot_of_rank(before.firsts + own.firsts);
      evicted += TakeSlot(block, row, slot, best);
    } else if (seen < kNoSlot) {
      const int first = task.MentionOf(seen);
      slot = slot_of_rank(shared.first_before[first / task.segment] + __ldcg(task.order() + first));
    }
    if (seen < kNoSlot) task.GiveSlot(m, slot);
    if (is_filled) {
      int32_t source = kSourceHost;
      if (is_new) {
        source = Entry(task, m).AmongNew();
      } else if (place != INT32_MAX) {
        source = new_rows + place;
        ++useful;
      } else {
        ++recalled;
      }
      const int to = before.fills + own.fills;
      task.fill_rows[to] = row;
      task.fill_slots[to] = slot;
      task.fill_mention[to] = m;
      task.fill_source[to] = source;
    }
    before = {before.firsts + total.firsts, before.fills + total.fills};
    __syncthreads();  // the totals have been read
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

// `missing` mentions of rows that have no slot, at least one. Keys and marks are there; the cluster's blocks have arrived,
// and nobody has waited.
template <int kBlocks>
__device__ void Settle(Block<kBlocks>& block, int missing, const Samples<kBlocks>& samples) {
  auto& shared = block.shared;
  const int count = ListWanted(block);
  const Ranks own = Rank(block, count);
  ECHO_PHASE(Ranked);
  FindStaged(block);
  const bool is_single = missing == 1, is_guessed = !is_single && IsGuessed(missing, block.task.device_slots);
  ClusterWait();
  ECHO_PHASE(AllStarted);
  if (is_single || is_guessed) ShareLows(block, is_single ? LowestSlot(block) : samples.Lowest());
  if (threadIdx.x < kBlocks) {
    *Remote(&shared.first_of_blocks[block.rank], threadIdx.x) = own.firsts;
    *Remote(&shared.fill_of_blocks[block.rank], threadIdx.x) = own.fills;
  }
  ECHO_PHASE(Shared);
  ClusterSync();
  ECHO_PHASE(AllRanked);
  const int rows = CountBefore(block);
  if (is_single) {
    const uint64_t lowest = LowestOfWarp(LowOfGroup(block));
    __syncthreads();
    Finish(block, count, [lowest](int) { return lowest == kNoKey ? kNoSlot : static_cast<int32_t>(lowest & 0xffffffffu); });
    ECHO_PHASE(Finished);
    return;
  }
  bool is_enough = false;
  if (is_guessed) {
    Collect(block, GuessedBound(block, missing));
    ECHO_PHASE(Collected);
    ClusterSync();
    ECHO_PHASE(AllCollected);
    is_enough = AreEnough(block, rows);
    if (is_enough) RankCandidates(block, rows);
    ECHO_PHASE(Chosen);
    ClusterSync();  // the choice is there; or, where all slots are gone through, every block has read why
    ECHO_PHASE(AllChosen);
  }
  if (is_enough) {
    Finish(block, count, [&](int rank) { return shared.guess.taken[rank]; });
  } else {
    const Taken taken = SelectLowest(block, rows);
    ECHO_PHASE(Selected);
    Finish(block, count, [&](int rank) { return rank < taken.count ? __ldcg(taken.slots + rank) : kNoSlot; });
  }
  ECHO_PHASE(Finished);
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_SETTLE_CUH_
