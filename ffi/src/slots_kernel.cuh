// echo_allocate and echo_require as one kernel of one cluster each, echo_release as one kernel.
//
// What allocate means stands in pool.allocate of echo_jax/pool.py. How it goes:
//
//   Look     a mention a thread: its row is looked up. A resident row's slot is marked in the shared memory of the block that
//            owns it; the first mark counts the hit. A missing row's first mention leaves its marker in slot_of.
//   -------- barrier of the cluster: who found what; while it is waited for, hits write their priorities
//   Touch    slots that were named more than once get the highest of their priorities.
//   Settle   slots_settle.cuh, where rows are missing; where none is, new rows that have a slot are listed, or nothing is.
//   Move     echo_require alone: the records, by the kernel of rows (rows_kernel.cuh).
//
// Nothing survives a call: scratch and shared memory are written before they are read. What limits the common case is
// latency: a chain of accesses to memory and of barriers, each of which needs the one before it. Hence one cluster, whose
// blocks meet within half a microsecond and mark each other's slots without asking the L2, and no grid, whose blocks would
// find more rows at a time and meet through memory.
#ifndef ECHO_FFI_SLOTS_KERNEL_CUH_
#define ECHO_FFI_SLOTS_KERNEL_CUH_

#include <cstdint>

#include "rows_jobs.cuh"
#include "rows_kernel.cuh"
#include "slots_guess.cuh"
#include "slots_select.cuh"
#include "slots_settle.cuh"

namespace echo_ffi {

// ---- allocate ----------------------------------------------------------------------------------------------------------

// No slot is protected but those beyond the last one.
template <int kBlocks>
__device__ void ClearMarks(Block<kBlocks>& block) {
  const int slots = block.own_slots();
  for (int word = threadIdx.x; word < block.words(); word += kThreads) {
    const int left = slots - word * 32;
    block.is_protected[word] = left >= 32 ? 0 : left <= 0 ? ~0u : ~0u << left;
  }
}

// Protects a slot; whether it was.
template <int kBlocks>
__device__ bool Protect(Block<kBlocks>& block, int32_t slot) {
  const uint32_t owner = static_cast<uint32_t>(slot) / static_cast<uint32_t>(block.task.adjacent);
  const uint32_t at = static_cast<uint32_t>(slot) - owner * static_cast<uint32_t>(block.task.adjacent);
  const uint32_t bit = 1u << at % 32;
  return (atomicOr(Remote(&block.is_protected[at / 32], owner), bit) & bit) != 0;
}

template <int kBlocks>
__device__ void Look(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  auto& shared = block.shared;
  int hits = 0, missing = 0, fresh = 0;
  bool is_any_repeated = false, has_met = false;
  // A warp without entries goes through it once: it has slots to load, and to meet the others.
  int round = block.run_begin;
  do {
    int32_t row[kTogether], found[kTogether], given[kTogether];
    unsigned positions = 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      given[i] = m < block.run_end ? task.touched[m] : 0;
      bool is_position = false;
      row[i] = m < block.run_end ? *block.SaidAt(m, &is_position) : kNoRow;
      positions |= is_position ? 1u << i : 0;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (positions >> i & 1) row[i] = block.RowOf(round + 32 * i + Lane(), row[i]);
    }
    SampleShare<kBlocks> samples;
    if (!has_met) samples.Load(block);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) found[i] = block.IsRow(row[i]) ? __ldcg(task.slot_of + row[i]) : kNoSlot;
    ECHO_PHASE(RowsRead);
    if (!has_met) {
      LoadKeys(block);
      ClusterWait();  // all have started: their marks are clear
      ECHO_PHASE(AllStarted);
      samples.Share(block);
      ECHO_PHASE(SamplesShared);
      has_met = true;
    }
    bool was_marked[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) was_marked[i] = block.IsSlot(found[i]) && Protect(block, found[i]);
    ECHO_PHASE(SlotsRead);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      const bool is_row = block.IsRow(row[i]), is_resident = block.IsSlot(found[i]), is_missing = is_row && !is_resident;
      if (is_missing || (is_row && block.IsNew(m))) block.row()[m] = row[i];
      if (is_missing) Mark(block, m, row[i], given[i]);
      hits += __popc(__ballot_sync(kAllLanes, is_resident && !was_marked[i]));
      missing += __popc(__ballot_sync(kAllLanes, is_missing));
      fresh += __popc(__ballot_sync(kAllLanes, is_row && block.IsNew(m)));
      is_any_repeated |= was_marked[i];
      if (m < block.run_end) block.seen[m - block.begin] = is_resident ? found[i] : is_missing ? kMissing : kNoSlot;
    }
    round += 32 * kTogether;
  } while (round < block.run_end);
  is_any_repeated = __ballot_sync(kAllLanes, is_any_repeated) != 0;
  ECHO_PHASE(Marked);
  if (Lane() == 0) {
    shared.warp_first[Warp()] = 0;  // unless rows are missing: then Rank counts both
    shared.warp_fill[Warp()] = fresh;
    if (hits > 0) atomicAdd(&shared.found.hits, hits);
    if (missing > 0) atomicAdd(&shared.found.missing, missing);
    if (fresh > 0) atomicAdd(&shared.found.fresh, fresh);
    if (is_any_repeated) shared.found.repeated = 1;
  }
  __syncthreads();
  if (threadIdx.x < kBlocks) *Remote(&shared.found_of_blocks[block.rank], threadIdx.x) = shared.found;
  ECHO_PHASE(Looked);
}

// What the look found goes to memory. No part of it is wanted by another block before the next barrier but one, so that the
// next one need not wait until it is there. Of a slot that is named more than once, any of its priorities.
template <int kBlocks>
__device__ void WriteFound(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  for (int round = block.run_begin; round < block.run_end; round += 32 * kTogether) {
    int32_t seen[kTogether], given[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      seen[i] = m < block.run_end ? block.seen[m - block.begin] : kNoSlot;
      given[i] = m < block.run_end ? task.touched[m] : 0;
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int m = round + 32 * i + Lane();
      if (m >= block.run_end) continue;
      if (seen[i] > kNoSlot) task.priority[seen[i]] = Clamped(given[i]);
      block.GiveSlot(m, seen[i]);
      if (!task.are_fills_a_result) continue;
      task.fill_rows[m] = task.fill_slots[m] = task.fill_mention[m] = task.fill_source[m] = -1;
    }
  }
}

// Every slot that is named has one of its priorities; every mention may raise it.
template <int kBlocks>
__device__ void TouchRepeated(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  for (int m = block.run_begin + Lane(); m < block.run_end; m += 32) {
    const int32_t seen = block.seen[m - block.begin];
    if (seen > kNoSlot) atomicMax(task.priority + seen, Clamped(task.touched[m]));
  }
}

// Whether the block may have entries to fill: then shared.fill_of_blocks counts those of all blocks.
template <int kBlocks>
__device__ bool AllocateOfBlock(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  auto& shared = block.shared;
  ECHO_PHASE(Begin);
  if (threadIdx.x == 0) shared.found = Found{};
  ClearMarks(block);
  ClusterArrive();
  ECHO_PHASE(Cleared);
  Look(block);
  ClusterArrive();
  WriteFound(block);
  ECHO_PHASE(Written);
  ClusterWait();
  ECHO_PHASE(AllLooked);
  Found all{};
#pragma unroll 4
  for (int peer = 0; peer < kBlocks; ++peer) {
    const Found& found = shared.found_of_blocks[peer];
    all = {all.hits + found.hits, all.missing + found.missing, all.fresh + found.fresh, all.repeated | found.repeated};
  }
  if (block.rank == 0 && threadIdx.x == 0) {
    const int32_t counts[kCounts] = {all.fresh, all.hits, 0, 0, all.fresh, 0};
    for (int which = 0; which < kCounts; ++which) *task.counts[which] = counts[which];
  }
  if (all.repeated) {
    ClusterSync();  // any of the priorities is there
    TouchRepeated(block);
    ECHO_PHASE(Touched);
  }
  if (all.missing > 0) {
    Settle(block, all.missing);
    return true;
  }
  WaitForCopies();  // of priorities that nobody needed
  if (all.fresh == 0) return false;
  if (threadIdx.x < kBlocks) {
    shared.first_before[threadIdx.x] = 0;
    shared.fill_of_blocks[threadIdx.x] = shared.found_of_blocks[threadIdx.x].fresh;
  }
  if (task.are_fills_a_result) {
    ClusterSync();  // what says nothing stands in the whole list, before some of it says something
  } else {
    __syncthreads();
  }
  Finish(block, [](int) { return kNoSlot; });
  ECHO_PHASE(Finished);
  return true;
}

template <int kBlocks>
__device__ void AllocateInCluster(const AllocateTask& task) {
  Block<kBlocks> block(task);
  AllocateOfBlock(block);
  ECHO_PHASE(End);
}

// ---- require -----------------------------------------------------------------------------------------------------------

struct RequireTask {
  AllocateTask allocate;
  RecallJobs recall;  // of the whole list; its count is not looked at
  bool is_aligned;    // every address of a record is a multiple of 16
};

// The fills that one block lists.
struct FillJobs {
  using Memory = RecallJobs::Memory;
  const RecallJobs& recall;
  int begin;
  int length;

  __device__ int64_t Limit() const { return recall.pool.HasLayer(*recall.layer) ? length : 0; }
  __device__ Move At(int64_t job) const { return recall.At(begin + job); }
};

// A block moves the records of its own part of the list, which it alone has listed: no barrier of the cluster is needed.
template <int kBlocks>
__device__ void RequireInCluster(const RequireTask& task) {
  FillJobs jobs{task.recall, 0, 0};
  {
    Block<kBlocks> block(task.allocate);
    if (!AllocateOfBlock(block)) return;
#pragma unroll 1
    for (int peer = 0; peer < block.rank; ++peer) jobs.begin += block.shared.fill_of_blocks[peer];
    jobs.length = block.shared.fill_of_blocks[block.rank];
  }
  if (jobs.length == 0) return;
  __syncthreads();
  const int64_t bytes = task.recall.records.bytes;
  const auto move_as = [&](auto shape) {
    using Chosen = decltype(shape);
    using Word = typename Chosen::Word;
    MoveAll<FillJobs, Word, Chosen::kLoads, Chosen::kMerged, Chosen::kMergedLoads>(
        jobs, static_cast<int>(bytes / static_cast<int64_t>(sizeof(Word))), 0, 1);
  };
  if (!task.is_aligned || bytes % 16 != 0) {
    move_as(ShapeOfWords{});
  } else if (bytes <= kShortBytes) {
    move_as(Shape<uint4, 2, 2, 3>{});  // of four rows at once as in ShapeOfShort the registers would spill
  } else {
    move_as(ShapeOfLong{});
  }
}

// ---- release -----------------------------------------------------------------------------------------------------------

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
