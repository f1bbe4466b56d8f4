// echo_allocate and echo_require as one kernel of one cluster each, of long lists with a kernel before it, and echo_release.
//
// What allocate means stands in pool.allocate of echo_jax/pool.py. How it goes:
//
//   Look     slots_look.cuh: which rows have a slot, and what follows for those. Of a long list a kernel of its own on all SMs.
//   -------- its end, or a barrier
//   Read     every block goes through the slots of its own that were found, marks them, and counts: which slots were hit,
//            which of them more than once, how many rows of the whole list are missing. All blocks come to the same answer
//            without asking each other, and where nothing is missing they are done.
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
#pragma unroll 1
  for (int word = threadIdx.x; word < block.task.words; word += kThreads) {
    const int left = block.task.device_slots - block.SlotAt(word * 32);
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

// use(what was found, entry) for every entry of the list, four neighbours a thread and four such loads under way.
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
      const int m = round + load * kThreads * 4;
      if (m >= task.length) break;  // whole warps, as a rule
      use(four[load].x, m);
      use(four[load].y, m + 1);
      use(four[load].z, m + 2);
      use(four[load].w, m + 3);
    }
  }
}

// The slots of this block that were found, each once for every mention of it, by place among its own. Returns this thread's
// part of the missing mentions, of the whole list.
template <int kBlocks, typename Use>
__device__ int ForEachOwn(const Block<kBlocks>& block, Use use) {
  const AllocateTask& task = block.task;
  int missing = 0;
  if (!task.is_look_apart) {
    ForEachFound(task, [&](int32_t found, int) {
      missing += found == kMissing;
      if (block.Owns(found)) use(block.PlaceAmongOwn(found));
    });
    return missing;
  }
  // Eight lanes a chunk, of whose 128 entries a sixteenth is this block's, as a rule; and as many chunks under way as registers
  // hold: a list of 31 seats has no more.
  constexpr int kLanes = 8, kChunks = 4, kLoads = 2, kApart = kThreads / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll 1
  for (int chunk = static_cast<int>(threadIdx.x) / kLanes; chunk < task.chunks(); chunk += kChunks * kApart) {
    const int32_t* slots = task.by_owner() + chunk * kChunk;
    int at[kChunks], end[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool is_chunk = chunk + i * kApart < task.chunks();
      const ChunkHead* head = task.heads() + (is_chunk ? chunk + i * kApart : 0);
      at[i] = is_chunk ? __ldcg(head->begin + block.rank) + lane : 0;
      end[i] = is_chunk ? __ldcg(head->begin + block.rank + 1) : 0;
      if (lane == 0 && is_chunk) missing += __ldcg(&head->missing);
    }
    bool is_more;
    do {
      int32_t found[kChunks][kLoads];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load, at[i] += kLanes) {
          found[i][load] = at[i] < end[i] ? __ldcg(slots + i * kApart * kChunk + at[i]) : kNoSlot;
        }
      }
      is_more = false;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          if (found[i][load] != kNoSlot) use(block.PlaceAmongOwn(found[i][load]));
        }
        is_more |= at[i] < end[i];
      }
    } while (is_more);
  }
  return missing;
}

struct Counts {
  int32_t of[kCounted];
};

// The sums of the threads' counts, for all threads. Leaves a barrier of the block behind.
template <int kBlocks>
__device__ Counts SumOfBlock(Block<kBlocks>& block, Counts counts) {
  auto& sums = block.shared.warp_counted;
#pragma unroll
  for (int which = 0; which < kCounted; ++which) {
    const int sum = __reduce_add_sync(kAllLanes, counts.of[which]);
    if (Lane() == 0) sums[which][Warp()] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int which = 0; which < kCounted; ++which) counts.of[which] = __reduce_add_sync(kAllLanes, sums[which][Lane()]);
  return counts;
}

// Marks the block's slots that are named and counts. Leaves a barrier behind.
template <int kBlocks>
__device__ Counts ReadFound(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  const int new_rows = task.count_of_new();
  const auto mention_of_new = [&](int i) { return i + task.by_new_of_seat.Of(i) * (task.per_seat - task.new_per_seat); };
  int new_row = threadIdx.x, of_new = kNoSlot;
  if (new_row < new_rows) of_new = __ldcg(task.found() + mention_of_new(new_row));  // under way beside the others
  Counts counts{};
  __syncthreads();  // marks are clear
  counts.of[kMissingRows] = ForEachOwn(block, [&](int at) {
    const uint32_t bit = 1u << at % 32;
    const bool was_marked = atomicOr(&block.is_protected[at / 32], bit) & bit;
    counts.of[kMarked] += !was_marked;
    counts.of[kRepeated] += was_marked;
  });
#pragma unroll 1
  while (new_row < new_rows) {
    const int m = mention_of_new(new_row);
    counts.of[kFreshBefore] += of_new != kNoSlot && m < block.begin;
    counts.of[kFresh] += of_new != kNoSlot && m >= block.begin && m < block.end;
    new_row += kThreads;
    if (new_row < new_rows) of_new = __ldcg(task.found() + mention_of_new(new_row));
  }
  return SumOfBlock(block, counts);
}

// Every slot that is named has one of its priorities; every mention of the block's slots may raise it, if they differ.
template <int kBlocks>
__device__ void TouchRepeated(const Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  if (task.is_touched_alike) return;
  ForEachFound(task, [&](int32_t found, int m) {
    if (block.Owns(found)) atomicMax(task.priority + found, Clamped(task.Touched(m)));
  });
}

// Whether the block may have entries to fill: then shared.fill_before and shared.fills say which.
template <int kBlocks>
__device__ bool AllocateOfBlock(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  auto& shared = block.shared;
  ECHO_PHASE(Begin);
  if (task.is_look_apart) {
    ClusterArriveRelaxed();  // for Settle, which waits until all have started
  } else {
    LoadKeys(block);
  }
  ClearMarks(block);
  ECHO_PHASE(Cleared);
  if (!task.is_look_apart) {
    // Runs of 32 entries to the blocks in turn: each has as many.
    Look(task, (Warp() * kBlocks + block.rank) * 32 + Lane(), kBlocks * kThreads);
    ECHO_PHASE(Looked);
    ClusterSync();
    ECHO_PHASE(AllLooked);
  }
  const Samples<kBlocks> samples(block);
  LoadSeen(block);
  const Counts counts = ReadFound(block);
  ECHO_PHASE(Found);
  if (threadIdx.x == 0) {
    if (counts.of[kMarked] > 0) atomicAdd(task.counts[kHits], counts.of[kMarked]);
    if (counts.of[kFresh] > 0) atomicAdd(task.counts[kWritten], counts.of[kFresh]);
  }
  if (counts.of[kRepeated] > 0) TouchRepeated(block);
  WaitForCopies();
  if (counts.of[kMissingRows] > 0) {
    if (task.is_look_apart) LoadKeys(block);  // now that they are in nothing's way
    __syncthreads();
    ECHO_PHASE(SeenRead);
    Settle(block, counts.of[kMissingRows], samples);
    return true;
  }
  if (counts.of[kFresh] == 0) return false;
  if (threadIdx.x == 0) {
    shared.fill_before = counts.of[kFreshBefore];
    shared.fills = counts.of[kFresh];
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
