// The look of the slot manager: which of the mentioned rows have a slot. Every mention is looked at by itself, of a long list
// by as many SMs as there are: what it takes are scattered accesses to memory, of which one SM does not do many at a time.
//
//   a row that has a slot      gives it its priority; where several mentions name it, any of theirs stays for now
//   a row that has none        leaves its marker in slot_of, of which the lowest, the first mention's, stays. Another look
//                              that meets a marker reads what it would have read: a number below NO_SLOT
//   padding                    nothing
//
// What each was found to be stands in AllocateTask::found for what comes behind it (slots_kernel.cuh). A look that is a kernel
// of its own also deals the slots it found to the blocks of the cluster that own them: each block of it has a chunk of
// neighbours, and leaves their slots by owner, so that no block of the cluster goes through slots of others.
#ifndef ECHO_FFI_SLOTS_LOOK_CUH_
#define ECHO_FFI_SLOTS_LOOK_CUH_

#include <cstdint>

#include "slots_task.cuh"

namespace echo_ffi {

// The row that a mention names: given, or a new one of its seat, or the one of a position.
__device__ inline int32_t RowOf(const AllocateTask& task, int mention) {
  if (task.rows != nullptr) return task.rows[mention];
  const Entry entry(task, mention);
  if (entry.IsNew()) return task.new_rows[entry.AmongNew()];
  const int32_t position = task.positions[entry.AmongPositions()];
  if (position < 0 || position >= task.table_width) return kNoRow;
  return task.table[entry.seat * static_cast<int64_t>(task.table_width) + position];
}

// What mention m is found to be.
__device__ inline int32_t LookAt(const AllocateTask& task, int m) {
  const int32_t given = Clamped(task.Touched(m));
  const int32_t row = RowOf(task, m);
  const bool is_row = row >= 0 && row < task.host_rows;
  const int32_t slot = is_row ? __ldcg(task.slot_of + row) : kNoSlot;
  const bool is_resident = slot >= 0 && slot < task.device_slots;
  if (is_resident) {
    task.priority[slot] = given;
  } else if (is_row) {
    task.place()[m] = INT32_MAX;
    task.best()[m] = given;
    atomicMin(task.slot_of + row, task.MarkerOf(m));
  }
  if (is_row) task.row()[m] = row;
  const int32_t found = is_resident ? slot : is_row ? kMissing : kNoSlot;
  task.found()[m] = found;
  task.GiveSlot(m, is_resident ? slot : kNoSlot);
  if (task.are_fills_a_result) {
    task.fill_rows[m] = task.fill_slots[m] = task.fill_mention[m] = task.fill_source[m] = -1;
  }
  return found;
}

// What is there before anything is found.
__device__ inline void BeginLook(const AllocateTask& task, int thread) {
  if (thread == 0) {
    for (int which = 0; which < kCounts; ++which) *task.counts[which] = 0;
  }
  if (thread < task.found_length() - task.length) task.found()[task.length + thread] = kNoSlot;
}

// Thread `thread` of `threads`, at least four, of a look within the cluster.
__device__ inline void Look(const AllocateTask& task, int thread, int threads) {
  BeginLook(task, thread);
#pragma unroll 1
  for (int m = thread; m < task.length; m += threads) LookAt(task, m);
}

struct LookShared {
  int32_t count[kMostBlocks + 1];  // of the slots of each owner, and of missing rows
  int32_t begin[kMostBlocks + 1];
};

// Of a block of kChunk threads of a look that is a kernel of its own: the chunk of its number, and others `blocks` further.
__device__ inline void LookAtChunks(const AllocateTask& task, LookShared& shared, int block, int blocks) {
  const int thread = static_cast<int>(threadIdx.x);
  if (block == 0) BeginLook(task, thread);
#pragma unroll 1
  for (int chunk = block; chunk < task.chunks(); chunk += blocks) {
    if (thread <= kMostBlocks) shared.count[thread] = 0;
    __syncthreads();
    const int m = chunk * kChunk + thread;
    const int32_t found = m < task.length ? LookAt(task, m) : kNoSlot;
    const int owner = found >= 0 ? task.OwnerOf(found) : kMostBlocks;
    const int among = found != kNoSlot ? atomicAdd(&shared.count[owner], 1) : 0;
    __syncthreads();
    if (Warp() == 0) {
      const int count = Lane() < kMostBlocks ? shared.count[Lane()] : 0;
      const int begin = WarpInclusiveSum(count) - count;
      ChunkHead& head = task.heads()[chunk];
      if (Lane() <= kMostBlocks) shared.begin[Lane()] = head.begin[Lane()] = static_cast<uint8_t>(begin);
      if (Lane() == 0) head.missing = static_cast<uint8_t>(shared.count[kMostBlocks]);
    }
    __syncthreads();
    if (found >= 0) task.by_owner()[chunk * kChunk + shared.begin[owner] + among] = found;
  }
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_LOOK_CUH_
