// What one block does to settle few missing rows, so few that a table of them fits into its shared memory and that the
// nominees suffice for them. Decides who takes which slot; knows nothing of how the mentions were looked up.
#ifndef ECHO_FFI_SLOTS_FEW_CUH_
#define ECHO_FFI_SLOTS_FEW_CUH_

#include <cstdint>

#include "echo_ffi/targets.h"
#include "slots_task.cuh"

namespace echo_ffi {

// Of a mention whose row is missing, until the row's marker is read; it is the marker of the last entry of a list too,
// which is no harm: nobody asks in between.
inline constexpr int32_t kMissing = -2;

__device__ inline int32_t Clamped(int32_t priority) { return min(max(priority, INT32_MIN + 1), INT32_MAX - 1); }

// Where a row lies in the table, or -1 where it is not in it.
__device__ inline int FindPlace(const FewShared& few, int32_t row) {
  int at = static_cast<int>(static_cast<uint32_t>(row) * 2654435761u >> 21);
  static_assert(kPlaces == 1 << (32 - 21));
  while (few.row[at] != row) {
    if (few.row[at] == kNoRow) return -1;
    at = (at + 1) % kPlaces;
  }
  return at;
}

// The same, and the row is in it on return. There is always room: at most half as many rows as places are put there.
__device__ inline int TakePlace(FewShared& few, int32_t row) {
  int at = static_cast<int>(static_cast<uint32_t>(row) * 2654435761u >> 21);
  for (;;) {
    const int32_t found = atomicCAS(&few.row[at], kNoRow, row);
    if (found == kNoRow || found == row) return at;
    at = (at + 1) % kPlaces;
  }
}

// Adds what the lanes of a warp count to one number.
__device__ inline void Tally(int32_t* sum, bool counts) {
  const unsigned lanes = __ballot_sync(kAllLanes, counts);
  if (Lane() == 0 && lanes != 0) atomicAdd(sum, __popc(lanes));
}

// Everything that is left after the look, but for the priorities of slots named more than once. False where the missing
// are too many or the nominees too few: nothing has changed then.
template <int kBlocks>
__device__ bool SettleFew(Block<kBlocks>& block, int hits) {
  const AllocateTask& task = block.task;
  FewShared& few = block.shared.few;
  // Two chains of loads side by side: nominee, then who is there and is it protected; bits, then their mentions.
  const int32_t nominee = static_cast<int>(threadIdx.x) < task.nominated ? task.nominees[threadIdx.x] : kNoSlot;
  const int words = (task.length + 31) / 32, run = (words + kThreads - 1) / kThreads;
  const int first_word = min(static_cast<int>(threadIdx.x) * run, words), end_word = min(first_word + run, words);
  const uint32_t first_bits = first_word < end_word ? __ldcg(block.wanted_words() + first_word) : 0;
  uint32_t marks = ~0u;
  int32_t victim = kNoRow;
  if (block.IsSlot(nominee)) {
    marks = __ldcg(block.protected_words() + nominee / 32);
    victim = __ldcg(task.host_of + nominee);
  }
  for (int at = threadIdx.x; at < kPlaces; at += kThreads) {
    few.row[at] = kNoRow;
    few.first[at] = few.place[at] = INT32_MAX;
    few.best[at] = INT32_MIN;
  }
  if (threadIdx.x == 0) few.useful = few.recalled = few.written = few.evicted = 0;
  int bits = __popc(first_bits);
  for (int word = first_word + 1; word < end_word; ++word) bits += __popc(__ldcg(block.wanted_words() + word));
  const Prefix listed = BlockSum(bits, few.totals[0]);
  if (listed.total > kFew) return false;
  int next = listed.before;
  for (int word = first_word; bits > 0 && word < end_word; ++word) {
    uint32_t left = word == first_word ? first_bits : __ldcg(block.wanted_words() + word);
    for (; left != 0; left &= left - 1) few.listed[next++] = word * 32 + __ffs(static_cast<int>(left)) - 1;
  }
  __syncthreads();

  // A thread each: who of several mentions is the first.
  const bool is_listed = static_cast<int>(threadIdx.x) < listed.total;
  int mention = 0, at = 0;
  int32_t row = kNoRow, slot = kNoSlot;
  if (is_listed) {
    mention = few.listed[threadIdx.x];
    row = task.rows[mention];
    slot = __ldcg(task.slots + mention);
  }
  const bool is_missing = is_listed && slot == kMissing;
  if (is_missing) {
    at = TakePlace(few, row);
    atomicMin(&few.first[at], mention);
    atomicMax(&few.best[at], Clamped(task.touched[mention]));
  }
  const bool is_open = !(marks >> (nominee & 31) & 1);
  const Prefix open = BlockSum(is_open, few.totals[1]);  // its barrier is the table's too
  const bool is_first = is_missing && few.first[at] == mention;
  const bool is_new = is_listed && block.IsNew(mention);
  // Two sums in one: both are at most kFew.
  const Prefix both = BlockSum((is_first ? 1 << 16 : 0) | (is_first || is_new ? 1 : 0), few.totals[2]);
  static_assert(kFew < 1 << 15);
  const int needed = both.total >> 16, fills = both.total & 0xffff;
  const int rank = both.before >> 16, to = both.before & 0xffff;
  if (needed > open.total) return false;

  // The nominees that are not protected are taken in their order.
  if (is_open && open.before < needed) {
    few.taken[open.before] = nominee;
    few.victim[open.before] = victim;
  }
  if (is_first) few.order[at] = rank;
  for (int e = threadIdx.x; needed > 0 && e < task.staged_length; e += kThreads) {
    const int32_t staged = task.staged[e];
    const int found = block.IsRow(staged) ? FindPlace(few, staged) : -1;
    if (found >= 0) atomicMin(&few.place[found], e);
  }
  __syncthreads();

  if (is_missing) {
    slot = few.taken[few.order[at]];
    task.slots[mention] = slot;
  }
  if (is_first) {
    const int32_t leaves = few.victim[rank];
    if (block.IsRow(leaves)) task.slot_of[leaves] = kNoSlot;
    task.slot_of[row] = slot;
    task.host_of[slot] = row;
    task.free[slot] = false;
    task.select.priority[slot] = few.best[at];
  }
  const int32_t place = is_first ? few.place[at] : INT32_MAX;
  if (is_first || is_new) {
    int32_t source = kSourceHost;
    if (is_new) {
      source = mention / task.per_seat * task.new_per_seat + mention % task.per_seat;
    } else if (place != INT32_MAX) {
      source = task.length / task.per_seat * task.new_per_seat + place;
    }
    task.fill_rows[to] = row;
    task.fill_slots[to] = slot;
    task.fill_mention[to] = mention;
    task.fill_source[to] = source;
  }
  Tally(&few.useful, is_first && !is_new && place != INT32_MAX);
  Tally(&few.recalled, is_first && !is_new && place == INT32_MAX);
  Tally(&few.written, is_new);
  Tally(&few.evicted, is_first && block.IsRow(few.victim[is_first ? rank : 0]));
  __syncthreads();
  if (threadIdx.x == 0) {
    const int32_t counts[kCounts] = {fills, hits, few.useful, few.recalled, few.written, few.evicted};
    for (int which = 0; which < kCounts; ++which) *task.counts[which] = counts[which];
  }
  return true;
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_FEW_CUH_
