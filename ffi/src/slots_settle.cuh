// How missing rows get slots. Knows the mentions as the look left them in Block::seen.
//
//   Mark     in the look: every mention of a missing row writes its marker into slot_of, of which the lowest, the first
//            mention's, stays. Another look that meets a marker reads what it would have read: a number below NO_SLOT.
//   -------- barrier
//   Rank     they read who was first; firsts are counted in list order; later mentions hand their priority to the first;
//            staged rows find the first mention of their row. Then the bound of the lowest slots is guessed, and what lies
//            below it collected.
//   -------- barrier
//   Choose   the collected slots are ranked.
//   -------- barrier
//   Finish   firsts take the slot of their rank, write all maps and the fills; later mentions read the first's rank.
//
// Where too many are missing for a guess, or it was a bad one, SelectLowest goes through all slots before Finish.
#ifndef ECHO_FFI_SLOTS_SETTLE_CUH_
#define ECHO_FFI_SLOTS_SETTLE_CUH_

#include <cstdint>

#include "echo_ffi/targets.h"
#include "slots_guess.cuh"
#include "slots_select.cuh"

namespace echo_ffi {

// Of a mention whose row is missing, until the row's marker is read; it is the marker of the last entry of a list too,
// which is no harm: nobody asks in between.
inline constexpr int32_t kMissing = -2;

// The entries of a warp's run, kTogether rounds of 32 at a time: what they load is under way together.
inline constexpr int kTogether = 4;

__device__ inline int32_t Clamped(int32_t priority) { return min(max(priority, INT32_MIN + 1), INT32_MAX - 1); }

// ---- Mark --------------------------------------------------------------------------------------------------------------

template <int kBlocks>
__device__ void Mark(Block<kBlocks>& block, int mention, int32_t row, int32_t priority) {
  block.place()[mention] = INT32_MAX;
  block.best()[mention] = Clamped(priority);
  atomicMin(block.task.slot_of + row, block.MarkerOf(mention));
}

// ---- Rank --------------------------------------------------------------------------------------------------------------

template <int kBlocks>
__device__ void Rank(Block<kBlocks>& block) {
  auto& shared = block.shared;
  const AllocateTask& task = block.task;
  int first_in_warp = 0, fill_in_warp = 0;
  for (int round = block.run_begin; round < block.run_end; round += 32 * kTogether) {
    int32_t seen[kTogether], given[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      seen[i] = m < block.run_end ? block.seen[m - block.begin] : kNoSlot;
      given[i] = seen[i] < kNoSlot ? task.touched[m] : 0;
      if (seen[i] == kMissing) seen[i] = __ldcg(task.slot_of + block.row()[m]);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      const bool is_first = seen[i] < kNoSlot && seen[i] == block.MarkerOf(m);
      if (seen[i] < kNoSlot) {
        block.seen[m - block.begin] = seen[i];
        if (!is_first) atomicMax(block.best() + block.MentionOf(seen[i]), Clamped(given[i]));
      }
      const bool must_fill = is_first || (seen[i] != kNoSlot && block.IsNew(m));
      first_in_warp += __popc(__ballot_sync(kAllLanes, is_first));
      fill_in_warp += __popc(__ballot_sync(kAllLanes, must_fill));
    }
  }
  if (Lane() == 0) {
    shared.warp_first[Warp()] = first_in_warp;
    shared.warp_fill[Warp()] = fill_in_warp;
  }
  ECHO_PHASE(FirstsRead);
  for (int e = block.rank * kThreads + threadIdx.x; e < task.staged_length; e += kBlocks * kThreads) {
    const int32_t row = task.staged[e];
    if (!block.IsRow(row)) continue;
    const int32_t marker = __ldcg(task.slot_of + row);
    if (marker < kNoSlot) atomicMin(block.place() + block.MentionOf(marker), e);
  }
  __syncthreads();
  const Prefix firsts = PrefixOfWarps(shared.warp_first), fills = PrefixOfWarps(shared.warp_fill);
  if (threadIdx.x < kBlocks) {
    *Remote(&shared.first_of_blocks[block.rank], threadIdx.x) = firsts.total;
    *Remote(&shared.fill_of_blocks[block.rank], threadIdx.x) = fills.total;
  }
  int next = firsts.before;
  for (int round = block.run_begin; first_in_warp > 0 && round < block.run_end; round += 32) {
    const int m = round + Lane();
    const bool is_first = m < block.run_end && block.seen[m - block.begin] == block.MarkerOf(m);
    const unsigned lanes = __ballot_sync(kAllLanes, is_first);
    if (is_first) block.order()[m] = next + __popc(lanes & ((1u << Lane()) - 1));
    next += __popc(lanes);
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
  int next_fill = PrefixOfWarps(shared.warp_fill).before, fills = 0;
#pragma unroll 4
  for (int peer = 0; peer < kBlocks; ++peer) {
    if (peer == block.rank) next_fill += fills;
    fills += shared.fill_of_blocks[peer];
  }
  if (block.rank == 0 && threadIdx.x == 0) *task.counts[kToFill] = fills;
  const int new_rows = task.length / task.per_seat * task.new_per_seat;
  int useful = 0, recalled = 0, evicted = 0;
  for (int round = block.run_begin; round < block.run_end; round += 32) {
    const int m = round + Lane();
    const bool is_entry = m < block.run_end;
    const int32_t seen = is_entry ? block.seen[m - block.begin] : kNoSlot;
    const bool is_first = is_entry && seen < kNoSlot && seen == block.MarkerOf(m);
    const bool is_new = seen != kNoSlot && block.IsNew(m);
    const unsigned firsts = __ballot_sync(kAllLanes, is_first), filled = __ballot_sync(kAllLanes, is_first || is_new);
    const unsigned below = (1u << Lane()) - 1;
    // Together, and before any of them is waited for.
    const int32_t row = is_first || is_new ? block.row()[m] : kNoRow;
    const int32_t best = is_first ? __ldcg(block.best() + m) : 0;
    const int32_t place = is_first ? __ldcg(block.place() + m) : INT32_MAX;
    int32_t slot = seen;
    if (is_first) {
      slot = slot_of_rank(next_first + __popc(firsts & below));
      evicted += TakeSlot(block, row, slot, best);
    } else if (seen < kNoSlot) {
      const int first = block.MentionOf(seen);
      slot = slot_of_rank(shared.first_before[first / task.segment] + __ldcg(block.order() + first));
    }
    if (seen < kNoSlot) block.GiveSlot(m, slot);
    if (is_first || is_new) {
      int32_t source = kSourceHost;
      if (is_new) {
        source = m / task.per_seat * task.new_per_seat + m % task.per_seat;
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
}

// ---- all of it ---------------------------------------------------------------------------------------------------------

// `missing` mentions of rows that have no slot, at least one. The counts are zero or what the look found.
template <int kBlocks>
__device__ void Settle(Block<kBlocks>& block, int missing) {
  auto& shared = block.shared;
  WaitForCopies();  // there for the block by the barrier within Rank
  ECHO_PHASE(KeysRead);
  Rank(block);
  ECHO_PHASE(Ranked);
  const bool is_guessed = missing <= min(kMostGuessed, block.task.device_slots);
  if (is_guessed) Collect(block, FindGuess(block, BoundRank(missing, block.task.device_slots)));
  ECHO_PHASE(Collected);
  ClusterSync();
  ECHO_PHASE(AllCollected);
  int rows = 0;
#pragma unroll 4
  for (int peer = 0; peer < kBlocks; ++peer) {
    if (static_cast<int>(threadIdx.x) == peer) shared.first_before[peer] = rows;
    rows += shared.first_of_blocks[peer];
  }
  bool is_enough = false;
  if (is_guessed) {
    const int candidates = Candidates(block);
    is_enough = candidates >= missing && candidates <= kMostCandidates;
    if (is_enough) RankCandidates(block, candidates, missing);
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
