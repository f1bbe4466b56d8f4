// echo_allocate as one kernel of one cluster, and echo_release as one kernel.
//
// What it means stands in pool.allocate of echo_jax/pool.py. How it goes, with the cluster's barriers between:
//
//   Look     every mention looks its row up. A resident row's slot is marked protected in the shared memory of the block
//            it was dealt to; the first mark counts the hit and clears the slot's priority. A missing row's mentions write
//            their markers into slot_of, of which the lowest, the first mention's, stays. Meanwhile the priorities are on
//            their way into shared memory and the lists of fills are painted with padding.
//   -------- nothing missing: go to Finish
//   Rank     mentions of missing rows read who was first; firsts are counted in list order; later mentions hand their
//            priority to the first; staged rows find the first mention of their row; residents' priorities are written.
//            Each block proposes the lowest of its slots.
//   -------- few wanted: one barrier. Many: SelectMany, with its own
//   Finish   firsts take the slot of their rank, write all maps and the fills; later mentions read the first's rank.
//
// Nothing survives a call: scratch and shared memory are written before they are read. The limit of the common case is
// latency: three loads that depend on each other, two barriers of the cluster, and the traffic of one's priorities.
#ifndef ECHO_FFI_SLOTS_KERNEL_CUH_
#define ECHO_FFI_SLOTS_KERNEL_CUH_

#include <cstdint>

#include "echo_ffi/targets.h"
#include "slots_select.cuh"

namespace echo_ffi {

// Of a mention whose row is missing, until the row's marker is read; it is the marker of the last entry of a list too,
// which is no harm: nobody asks in between.
inline constexpr int32_t kMissing = -2;

__device__ inline int32_t Clamped(int32_t priority) { return min(max(priority, INT32_MIN + 1), INT32_MAX - 1); }

// ---- Look --------------------------------------------------------------------------------------------------------------

template <int kBlocks>
__device__ void Prepare(Block<kBlocks>& block) {
  auto& shared = block.shared;
  const AllocateTask& task = block.task;
  for (int word = threadIdx.x; word < task.dealt / 32; word += kThreads) {
    const int slots = task.device_slots - block.SlotAt(word * 32);  // from here to the end
    block.is_protected[word] = slots >= 32 ? 0u : slots <= 0 ? ~0u : ~0u << slots;
  }
  if (threadIdx.x == 0) shared.missing_of_all = shared.hits = 0;
  if (threadIdx.x < kBlocks) shared.new_of_blocks[threadIdx.x] = 0;
  if (block.rank == 0 && threadIdx.x < 8) task.counts[threadIdx.x] = 0;
}

template <int kBlocks>
__device__ void LoadKeys(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  if (!task.are_keys_shared) return;
  for (int dealt = threadIdx.x * 4; dealt < task.dealt; dealt += kThreads * 4) {
    const int slot = block.SlotAt(dealt);
    const int bytes = min(max(task.device_slots - slot, 0), 4) * 4;
    if (bytes > 0) CopyAsync16(block.keys + dealt, task.priority + slot, bytes);
  }
}

// Brings what Rank will ask about staged rows as far as the L2.
template <int kBlocks>
__device__ void FetchStaged(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  const int e = block.rank * kThreads + threadIdx.x;
  if (e >= task.staged_length) return;
  const int32_t row = task.staged[e];
  if (block.IsRow(row)) FetchToL2(task.slot_of + row);
}

template <int kBlocks>
__device__ void PaintFills(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  for (int m = block.run_begin + Lane(); m < block.run_end; m += 32) {
    task.fill_rows[m] = task.fill_slots[m] = task.fill_mention[m] = task.fill_source[m] = -1;
  }
}

// The entries of a warp's run, kTogether rounds of 32 at a time: what they load is under way together.
inline constexpr int kTogether = 4;

template <int kBlocks>
__device__ void Look(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  auto& shared = block.shared;
  Prepare(block);
  ClusterArrive();
  LoadKeys(block);
  int missing = 0, hits = 0, fresh = 0;
  bool is_started = false;
  for (int round = block.run_begin; !is_started || round < block.run_end; round += 32 * kTogether) {
    int32_t row[kTogether], slot[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      row[i] = m < block.run_end ? task.rows[m] : kNoRow;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) slot[i] = block.IsRow(row[i]) ? __ldcg(task.slot_of + row[i]) : kNoSlot;
    if (!is_started) {
      PaintFills(block);
      FetchStaged(block);
      ClusterWait();  // the others' shared memory is ready to be marked
      is_started = true;
    }
    uint32_t marks[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (slot[i] < 0 || slot[i] >= task.device_slots) continue;
      uint32_t* word = Remote(block.is_protected + block.DealtAt(slot[i]) / 32, block.OwnerOf(slot[i]));
      marks[i] = atomicOr(word, 1u << (slot[i] & 31));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      if (m >= block.run_end) continue;
      int32_t seen = kNoSlot;
      if (block.IsRow(row[i])) {
        fresh += block.IsNew(m);
        if (slot[i] >= 0 && slot[i] < task.device_slots) {
          seen = slot[i];
          if (!(marks[i] >> (seen & 31) & 1)) {
            ++hits;
            task.priority[seen] = kFreePriority;
          }
        } else {
          seen = kMissing;
          atomicMin(task.slot_of + row[i], block.MarkerOf(m));
          block.place()[m] = INT32_MAX;
          block.best()[m] = Clamped(task.touched[m]);
          ++missing;
        }
      }
      block.seen[m - block.begin] = seen;
    }
  }
  missing = __reduce_add_sync(kAllLanes, missing);
  hits = __reduce_add_sync(kAllLanes, hits);
  fresh = __reduce_add_sync(kAllLanes, fresh);
  if (Lane() < kBlocks) {
    if (missing > 0) atomicAdd(Remote(&shared.missing_of_all, Lane()), missing);
    if (fresh > 0) atomicAdd(Remote(&shared.new_of_blocks[block.rank], Lane()), fresh);
  }
  if (Lane() == 0) {
    shared.warp_new[Warp()] = fresh;
    if (hits > 0) atomicAdd(&shared.hits, hits);
  }
  WaitForCopies();
}

// ---- Rank --------------------------------------------------------------------------------------------------------------

// Of a resident row's mention: its priority reaches the slot.
template <int kBlocks>
__device__ void TouchResident(Block<kBlocks>& block, int32_t seen, int32_t given) {
  if (seen >= 0) atomicMax(block.task.priority + seen, Clamped(given));
}

template <int kBlocks>
__device__ void TouchResidents(Block<kBlocks>& block) {
  for (int round = block.run_begin; round < block.run_end; round += 32 * kTogether) {
    int32_t seen[kTogether], given[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      seen[i] = m < block.run_end ? block.seen[m - block.begin] : kNoSlot;
      given[i] = seen[i] >= 0 ? block.task.touched[m] : 0;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) TouchResident(block, seen[i], given[i]);
  }
}

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
      given[i] = seen[i] != kNoSlot ? task.touched[m] : 0;
      if (seen[i] == kMissing) seen[i] = __ldcg(task.slot_of + task.rows[m]);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      const bool is_first = seen[i] < kNoSlot && seen[i] == block.MarkerOf(m);
      if (seen[i] < kNoSlot) {
        block.seen[m - block.begin] = seen[i];
        if (!is_first) atomicMax(block.best() + block.MentionOf(seen[i]), Clamped(given[i]));
      }
      TouchResident(block, seen[i], given[i]);
      const bool must_fill = is_first || (seen[i] != kNoSlot && block.IsNew(m));
      first_in_warp += __popc(__ballot_sync(kAllLanes, is_first));
      fill_in_warp += __popc(__ballot_sync(kAllLanes, must_fill));
    }
  }
  if (Lane() == 0) {
    shared.warp_first[Warp()] = first_in_warp;
    shared.warp_fill[Warp()] = fill_in_warp;
  }
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

template <int kBlocks>
__device__ void TakeSlot(Block<kBlocks>& block, int mention, int32_t row, int32_t slot) {
  const AllocateTask& task = block.task;
  task.slot_of[row] = slot;
  if (slot == kNoSlot) return;  // more rows than slots: the caller broke the promise, and the row stays where it is
  const int32_t victim = __ldcg(task.host_of + slot);
  if (block.IsRow(victim)) task.slot_of[victim] = kNoSlot;
  task.host_of[slot] = row;
  task.free[slot] = false;
  task.priority[slot] = __ldcg(block.best() + mention);
}

// slot_of_rank(rank) is the slot of the missing row of that rank.
template <int kBlocks, typename SlotOfRank>
__device__ void Finish(Block<kBlocks>& block, const int* warp_first, const int* warp_fill, const int* fill_of_blocks,
                       SlotOfRank slot_of_rank) {
  auto& shared = block.shared;
  const AllocateTask& task = block.task;
  const bool any_missing = warp_first != nullptr;
  int next_first = any_missing ? shared.first_before[block.rank] + PrefixOfWarps(warp_first).before : 0;
  int next_fill = PrefixOfWarps(warp_fill).before, fills = 0, fresh = 0;
  for (int peer = 0; peer < kBlocks; ++peer) {
    if (peer == block.rank) next_fill += fills;
    fills += fill_of_blocks[peer];
    fresh += shared.new_of_blocks[peer];
  }
  if (block.rank == 0 && threadIdx.x == 0) {
    task.counts[kToFill] = fills;
    task.counts[kWritten] = fresh;
  }
  const int new_rows = task.length / task.per_seat * task.new_per_seat;
  int useful = 0, recalled = 0;
  for (int round = block.run_begin; round < block.run_end; round += 32) {
    const int m = round + Lane();
    const bool is_entry = m < block.run_end;
    const int32_t seen = is_entry ? block.seen[m - block.begin] : kNoSlot;
    const bool is_first = any_missing && is_entry && seen < kNoSlot && seen == block.MarkerOf(m);
    const bool is_new = seen != kNoSlot && block.IsNew(m);
    const unsigned firsts = __ballot_sync(kAllLanes, is_first), filled = __ballot_sync(kAllLanes, is_first || is_new);
    const unsigned below = (1u << Lane()) - 1;
    int32_t slot = seen;
    if (is_first) {
      slot = slot_of_rank(next_first + __popc(firsts & below));
      TakeSlot(block, m, task.rows[m], slot);
    } else if (seen < kNoSlot) {
      const int first = block.MentionOf(seen);
      slot = slot_of_rank(shared.first_before[first / task.segment] + __ldcg(block.order() + first));
    }
    if (is_entry) task.slots[m] = slot;
    if (is_first || is_new) {
      int32_t source = kSourceHost;
      if (is_new) {
        source = m / task.per_seat * task.new_per_seat + m % task.per_seat;
      } else if (const int32_t place = __ldcg(block.place() + m); place != INT32_MAX) {
        source = new_rows + place;
        ++useful;
      } else {
        ++recalled;
      }
      const int to = next_fill + __popc(filled & below);
      task.fill_rows[to] = task.rows[m];
      task.fill_slots[to] = slot;
      task.fill_mention[to] = m;
      task.fill_source[to] = source;
    }
    next_first += __popc(firsts);
    next_fill += __popc(filled);
  }
  if (!any_missing) return;
  useful = __reduce_add_sync(kAllLanes, useful);
  recalled = __reduce_add_sync(kAllLanes, recalled);
  if (Lane() == 0) {
    if (useful > 0) atomicAdd(task.counts + kUseful, useful);
    if (recalled > 0) atomicAdd(task.counts + kRecalled, recalled);
  }
}

// ---- the kernels -------------------------------------------------------------------------------------------------------

template <int kBlocks>
__device__ void AllocateInCluster(const AllocateTask& task) {
  Block<kBlocks> block(task);
  auto& shared = block.shared;
  Look(block);
  ClusterSync();
  if (threadIdx.x == 0 && shared.hits > 0) atomicAdd(task.counts + kHits, shared.hits);
  const int missing = shared.missing_of_all;  // mentions: at least as many as rows
  if (missing == 0) {
    TouchResidents(block);
    Finish(block, nullptr, shared.warp_new, shared.new_of_blocks, [](int) { return kNoSlot; });
    return;
  }
  Rank(block);
  bool are_few = task.are_keys_shared && missing <= kCandidates / kBlocks;
  if (are_few) Propose(block, missing);
  ClusterSync();
  int rows = 0;
  for (int peer = 0; peer < kBlocks; ++peer) {
    if (static_cast<int>(threadIdx.x) == peer) shared.first_before[peer] = rows;
    rows += shared.first_of_blocks[peer];
    are_few = are_few && shared.proposals_of_blocks[peer] >= 0;
  }
  // Both ends of this have a barrier of the block, behind which first_before can be read.
  int evicted = 0;
  if (are_few) {
    evicted = Settle(block, missing, rows);
    Finish(block, shared.warp_first, shared.warp_fill, shared.fill_of_blocks,
           [&](int rank) { return shared.taken[rank]; });
  } else {
    const Taken taken = SelectMany(block, rows);
    evicted = taken.used;
    Finish(block, shared.warp_first, shared.warp_fill, shared.fill_of_blocks,
           [&](int rank) { return rank < taken.count ? __ldcg(taken.slots + rank) : kNoSlot; });
  }
  if (block.rank == 0 && threadIdx.x == 0) task.counts[kEvicted] = evicted;
}

struct ReleaseTask {
  int32_t *slot_of, *host_of, *priority;
  bool* free;
  const bool* is_dropped;
  int32_t host_rows, device_slots;
};

// Of the whole grid: thread `thread` of `threads`.
__device__ inline void ReleaseInGrid(const ReleaseTask& task, int64_t thread, int64_t threads) {
  for (int64_t slot = thread; slot < task.device_slots; slot += threads) {
    if (task.free[slot]) continue;
    const int32_t row = task.host_of[slot];
    if (row < 0 || row >= task.host_rows || !task.is_dropped[row]) continue;
    task.host_of[slot] = kNoRow;
    task.priority[slot] = kFreePriority;
    task.free[slot] = true;
  }
  for (int64_t row = thread; row < task.host_rows; row += threads) {
    if (task.is_dropped[row]) task.slot_of[row] = kNoSlot;
  }
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_KERNEL_CUH_
