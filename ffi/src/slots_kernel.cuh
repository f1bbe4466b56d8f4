// echo_nominate as one kernel of one cluster, echo_allocate as one kernel of some clusters, echo_release as one kernel.
//
// What allocate means stands in pool.allocate of echo_jax/pool.py. How it goes:
//
//   Look     by all blocks, a mention a thread: its row is looked up. A resident row's slot is marked; the first mark counts
//            the hit and writes the priority. Bits say which mentions are left: missing or new, and those whose slot had
//            been marked already. No map but `priority` changes.
//   -------- each block says that it is done; the last one to say so goes on, as nobody else will touch a thing
//   Few      that block alone (slots_few.cuh): the missing rows take the lowest nominees that are not marked.
//   Many     the last block's cluster (slots_many.cuh), where that was not possible.
//   Touch    the last block's cluster: slots that were named more than once get the highest of their priorities.
//
// So no block ever waits for one that may not have started: those of a cluster start together. Nothing survives a call:
// scratch and shared memory are written before they are read, and marks are zeroed by echo_nominate, once for each call.
// The limit of the common case is latency: a chain of nine accesses to the L2 or to memory, each of which needs the one
// before it.
#ifndef ECHO_FFI_SLOTS_KERNEL_CUH_
#define ECHO_FFI_SLOTS_KERNEL_CUH_

#include <cstdint>

#include "slots_few.cuh"
#include "slots_many.cuh"
#include "slots_select.cuh"

namespace echo_ffi {

// ---- nominate ----------------------------------------------------------------------------------------------------------

template <int kBlocks>
__device__ void NominateInCluster(const NominateTask& task) {
  auto& shared = *reinterpret_cast<NominateShared<kBlocks>*>(SharedMemory());
  Slots<kBlocks> slots(task.select, shared.select, SharedMemory() + sizeof(NominateShared<kBlocks>));
  ClusterArrive();
  LoadKeys(slots);
  LoadMarks(slots, nullptr);
  const int thread = slots.rank * kThreads + static_cast<int>(threadIdx.x);
  const int words = kMarksHeader + (task.select.device_slots + 31) / 32;
  for (int word = thread; word < words; word += kBlocks * kThreads) task.marks[word] = 0;
  WaitForCopies();
  __syncthreads();
  ClusterWait();
  NameLowest(slots, shared, task.nominated, task.nominees);
}

// ---- allocate ----------------------------------------------------------------------------------------------------------

// How far a grid is, in one number: blocks that are done, blocks that saw a slot named twice, hits.
inline constexpr int kRepeatedShift = 12, kHitsShift = 24;
static_assert(kMostBlocks < 1 << 12);

enum Verdict : int { kTouch = 1, kMany = 2 };  // bits

// Of the entries looked at by block `number` of the grid.
template <int kBlocks>
__device__ void Look(Block<kBlocks>& block, int number) {
  const AllocateTask& task = block.task;
  const int begin = block.Within(static_cast<int64_t>(number) * task.looked);
  const int end = block.Within(begin + static_cast<int64_t>(task.looked));
  int hits = 0;
  bool is_any_repeated = false;
  for (int base = begin + Warp() * 32; base < end; base += kThreads) {
    const int m = base + Lane();
    const bool is_entry = m < end;
    const int32_t row = is_entry ? task.rows[m] : kNoRow;
    const int32_t given = is_entry ? task.touched[m] : 0;
    const bool is_row = block.IsRow(row);
    const int32_t found = is_row ? __ldcg(task.slot_of + row) : kNoSlot;
    if (is_entry) task.fill_rows[m] = task.fill_slots[m] = task.fill_mention[m] = task.fill_source[m] = -1;
    const bool is_resident = is_row && block.IsSlot(found), is_missing = is_row && !is_resident;
    bool is_repeated = false;
    if (is_resident) {
      const uint32_t bit = 1u << (found & 31);
      is_repeated = atomicOr(block.protected_words() + found / 32, bit) & bit;
      if (!is_repeated) task.select.priority[found] = Clamped(given);
    }
    if (is_entry) task.slots[m] = is_resident ? found : is_missing ? kMissing : kNoSlot;
    const unsigned wanted = __ballot_sync(kAllLanes, is_missing || (is_row && block.IsNew(m)));
    const unsigned repeated = __ballot_sync(kAllLanes, is_repeated);
    hits += __popc(__ballot_sync(kAllLanes, is_resident && !is_repeated));
    is_any_repeated |= repeated != 0;
    if (Lane() == 0) {
      block.wanted_words()[base / 32] = wanted;
      block.repeated_words()[base / 32] = repeated;
    }
  }
  __syncthreads();  // the counts are zero
  if (Lane() == 0) {
    if (hits > 0) atomicAdd(&block.shared.hits, hits);
    if (is_any_repeated) block.shared.repeated = 1;
  }
}

// How far the grid is with this block, which is done with its look.
template <int kBlocks>
__device__ uint64_t SayDone(Block<kBlocks>& block) {
  auto& shared = block.shared;
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned long long own = 1ull | static_cast<unsigned long long>(shared.repeated) << kRepeatedShift |
                                   static_cast<unsigned long long>(shared.hits) << kHitsShift;
    __threadfence();
    shared.progress = own + atomicAdd(reinterpret_cast<unsigned long long*>(block.progress()), own);
    __threadfence();
  }
  __syncthreads();
  return shared.progress;
}

template <int kBlocks>
__device__ void TouchRepeated(Block<kBlocks>& block) {
  const AllocateTask& task = block.task;
  const int words = (task.length + 31) / 32;
  for (int word = block.rank * kWarps + Warp(); word < words; word += kBlocks * kWarps) {
    const uint32_t bits = __ldcg(block.repeated_words() + word);
    if (!(bits >> Lane() & 1)) continue;
    const int m = word * 32 + Lane();
    atomicMax(task.select.priority + __ldcg(task.slots + m), Clamped(task.touched[m]));
  }
}

// Of cluster `cluster` of a grid of task.clusters.
template <int kBlocks>
__device__ void AllocateInGrid(const AllocateTask& task, int cluster) {
  Block<kBlocks> block(task);
  auto& shared = block.shared;
  if (threadIdx.x == 0) shared.verdict = shared.hits = shared.repeated = 0;
  if (threadIdx.x < kBlocks) shared.new_of_blocks[threadIdx.x] = 0;
  ClusterArrive();
  Look(block, cluster * kBlocks + block.rank);
  const uint64_t progress = SayDone(block);
  ClusterWait();  // all have started: their shared memory is there
  if (static_cast<int>(progress & ((1u << kRepeatedShift) - 1)) == task.clusters * kBlocks) {
    const bool is_settled = SettleFew(block, static_cast<int>(progress >> kHitsShift));
    const bool is_any_repeated = (progress >> kRepeatedShift & ((1u << (kHitsShift - kRepeatedShift)) - 1)) != 0;
    const int verdict = (is_settled ? 0 : kMany) | (is_any_repeated ? kTouch : 0);
    if (verdict != 0 && threadIdx.x < kBlocks) {
      auto& theirs = *Remote(&shared, threadIdx.x);
      theirs.verdict = verdict;
      theirs.hits = static_cast<int>(progress >> kHitsShift);
    }
  }
  ClusterSync();
  if (shared.verdict & kTouch) TouchRepeated(block);
  if (shared.verdict & kMany) SettleMany(block, shared.hits);
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
