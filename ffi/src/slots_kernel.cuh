// echo_allocate and echo_require as one kernel of one cluster each, of long lists with a kernel before it, and echo_release.
//
// What allocate means stands in pool.allocate of echo_jax/pool.py. How it goes:
//
//   Look     slots_look.cuh: which rows have a slot, and what follows for those. Of a long list a kernel of its own on all SMs.
//   -------- its end, or a barrier
//   Read     every block goes through what was found, marks the slots of its own that were named, and counts: which slots
//            were hit, which of them more than once, how many rows are missing. All blocks come to the same answer without
//            asking each other, and where nothing is missing they are done.
//   Touch    slots that were named more than once get the highest of their priorities.
//   Settle   slots_settle.cuh, where rows are missing; where none is, new rows that have a slot are listed, or nothing is.
//   Move     echo_require alone: the records, by the kernel of rows (rows_kernel.cuh).
//
// Nothing survives a call: scratch and shared memory are written before they are read. What limits the common case is
// latency: a chain of accesses to memory and of barriers, each of which needs the one before it. Scattered accesses are the
// look's, because an SM does about one in three cycles; what blocks have to tell each other is one cluster's, whose blocks
// meet within half a microsecond.
#ifndef ECHO_FFI_SLOTS_KERNEL_CUH_
#define ECHO_FFI_SLOTS_KERNEL_CUH_

#include <cstdint>

#include "rows_jobs.cuh"
#include "rows_kernel.cuh"
#include "slots_guess.cuh"
#include "slots_look.cuh"
#include "slots_select.cuh"
#include "slots_settle.cuh"

namespace echo_ffi {

// ---- allocate ----------------------------------------------------------------------------------------------------------

// No slot is protected but those beyond the last one.
template <int kBlocks>
__device__ void ClearMarks(Block<kBlocks>& block) {
  const int slots = block.own_slots();
#pragma unroll 1
  for (int word = threadIdx.x; word < block.words(); word += kThreads) {
    const int left = slots - word * 32;
    block.is_protected[word] = left >= 32 ? 0 : left <= 0 ? ~0u : ~0u << left;
  }
}

// What the block's part of the list was found to be is on its way, as the keys are.
template <int kBlocks>
__device__ void LoadSeen(Block<kBlocks>& block) {
  const int32_t* found = block.task.found() + block.begin;
  const int count = block.end - block.begin;
#pragma unroll 1
  for (int at = threadIdx.x * 4; at < count; at += kThreads * 4) {
    if (block.task.is_list_shared) {
      CopyAsync16(block.seen + at, found + at, min(count - at, 4) * 4);
    } else {
#pragma unroll 1
      for (int i = at; i < min(count, at + 4); ++i) block.seen[i] = __ldcg(found + i);
    }
  }
}

// use(what was found) for every entry of the list, four neighbours a thread and four such loads under way.
template <typename Use>
__device__ void ForEachFound(const AllocateTask& task, Use use) {
  constexpr int kLoads = 4;
  const auto* found = reinterpret_cast<const int4*>(task.found());
#pragma unroll 1
  for (int round = threadIdx.x * 4; round < task.length; round += kThreads * 4 * kLoads) {
    int4 four[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int m = round + load * kThreads * 4;
      four[load] = m < task.length ? __ldcg(found + m / 4) : int4{kNoSlot, kNoSlot, kNoSlot, kNoSlot};
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (round + load * kThreads * 4 >= task.length) break;  // whole warps, as a rule
      use(four[load].x);
      use(four[load].y);
      use(four[load].z);
      use(four[load].w);
    }
  }
}

// Marks the block's slots that are named and counts, into shared.counted. Keys are on their way. Leaves a barrier behind.
template <int kBlocks>
__device__ void ReadFound(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  Counted& counted = block.shared.counted;
  const auto first_slot = static_cast<uint32_t>(block.first_slot()), own_slots = static_cast<uint32_t>(block.own_slots());
  const int new_rows = task.length / task.per_seat * task.new_per_seat;
  const auto mention_of_new = [&](int i) { return i / task.new_per_seat * task.per_seat + i % task.new_per_seat; };
  int i_of_new = threadIdx.x, of_new = i_of_new < new_rows ? __ldcg(task.found() + mention_of_new(i_of_new)) : kNoSlot;
  __syncthreads();  // marks are clear, counts zero
  int missing = 0, mentions = 0;
  ForEachFound(task, [&](int32_t found) {
    missing += found == kMissing;
    const uint32_t at = static_cast<uint32_t>(found) - first_slot;  // beyond all slots where it is none
    if (at >= own_slots) return;
    ++mentions;
    atomicOr(&block.is_protected[at / 32], 1u << at % 32);
  });
  int fresh = 0, fresh_before = 0;
#pragma unroll 1
  while (i_of_new < new_rows) {
    const int m = mention_of_new(i_of_new);
    fresh_before += of_new != kNoSlot && m < block.begin;
    fresh += of_new != kNoSlot && m >= block.begin && m < block.end;
    i_of_new += kThreads;
    if (i_of_new < new_rows) of_new = __ldcg(task.found() + mention_of_new(i_of_new));
  }
  missing = __reduce_add_sync(kAllLanes, missing);
  mentions = __reduce_add_sync(kAllLanes, mentions);
  if (Lane() == 0) {
    if (missing > 0) atomicAdd(&counted.missing, missing);
    if (mentions > 0) atomicAdd(&counted.mentions, mentions);
  }
  if (fresh > 0) atomicAdd(&counted.fresh, fresh);
  if (fresh_before > 0) atomicAdd(&counted.fresh_before, fresh_before);
  __syncthreads();
  int marked = 0;
#pragma unroll 1
  for (int word = threadIdx.x; word < block.words(); word += kThreads) marked += __popc(block.is_protected[word]);
  marked = __reduce_add_sync(kAllLanes, marked);
  if (Lane() == 0 && marked > 0) atomicAdd(&counted.marked, marked);
  if (threadIdx.x == 0) atomicAdd(&counted.marked, static_cast<int>(own_slots) - block.words() * 32);  // bits of no slot
  __syncthreads();
}

// Every slot that is named has one of its priorities; every mention of the block's slots may raise it.
template <int kBlocks>
__device__ void TouchRepeated(const Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  const auto first_slot = static_cast<uint32_t>(block.first_slot()), own_slots = static_cast<uint32_t>(block.own_slots());
#pragma unroll 1
  for (int m = threadIdx.x; m < task.length; m += kThreads) {
    const int32_t found = __ldcg(task.found() + m);
    if (found < 0 || static_cast<uint32_t>(found) - first_slot >= own_slots) continue;
    atomicMax(task.priority + found, Clamped(task.touched[m]));
  }
}

// Whether the block may have entries to fill: then shared.fill_before and shared.fills say which.
template <int kBlocks>
__device__ bool AllocateOfBlock(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  auto& shared = block.shared;
  ECHO_PHASE(Begin);
  LoadKeys(block);
  ClearMarks(block);
  if (threadIdx.x == 0) shared.counted = Counted{};
  const Samples<kBlocks> samples(block);
  ECHO_PHASE(Cleared);
  if (!task.is_look_apart) {
    // Runs of 32 entries to the blocks in turn: each has as many.
    Look(task, (Warp() * kBlocks + block.rank) * 32 + Lane(), kBlocks * kThreads);
    ECHO_PHASE(Looked);
    ClusterSync();
    ECHO_PHASE(AllLooked);
  }
  ClusterArriveRelaxed();  // for Settle, which waits until all have started
  LoadSeen(block);
  ReadFound(block);
  ECHO_PHASE(Found);
  const Counted counted = shared.counted;
  if (threadIdx.x == 0) {
    if (counted.marked > 0) atomicAdd(task.counts[kHits], counted.marked);
    if (counted.fresh > 0) atomicAdd(task.counts[kWritten], counted.fresh);
  }
  if (counted.mentions > counted.marked) TouchRepeated(block);
  WaitForCopies();
  ECHO_PHASE(KeysRead);
  if (counted.missing > 0) {
    __syncthreads();  // keys are there for the block
    Settle(block, counted.missing, samples);
    return true;
  }
  if (counted.fresh == 0) return false;
  if (threadIdx.x == 0) {
    shared.fill_before = counted.fresh_before;
    shared.fills = counted.fresh;
  }
  __syncthreads();
  Rank(block);
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
    jobs.begin = block.shared.fill_before;
    jobs.length = block.shared.fills;
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
