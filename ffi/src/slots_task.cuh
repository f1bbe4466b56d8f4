// What one launch of the slot manager works on: its operands, who owns which part of them, and the shared memory of a
// block. Knows sizes and places; decides nothing.
//
// The list is cut into segments, one a block, and those into runs, one a warp, so that order within the list is order of
// (block, warp, round, lane). The slots are dealt out to the blocks in chunks of 128: neighbours grow old together, and
// no block shall hold all the old ones.
#ifndef ECHO_FFI_SLOTS_TASK_CUH_
#define ECHO_FFI_SLOTS_TASK_CUH_

#include <cstddef>
#include <cstdint>

#include "cluster.cuh"
#include "echo_ffi/slots.h"

namespace echo_ffi {

inline constexpr int kChunk = 128;        // slots
inline constexpr int kCandidates = 1024;  // that all blocks together may propose to each other
inline constexpr int kBins = 1024;        // of a histogram of order keys: one a thread
inline constexpr int kDigits = 256;       // of a pass of the sort

struct AllocateTask {
  int32_t *slot_of, *host_of, *priority;
  bool* free;
  const int32_t *rows, *touched, *staged;
  int32_t *slots, *fill_rows, *fill_slots, *fill_mention, *fill_source, *counts, *scratch;
  int32_t host_rows, device_slots, length, staged_length, per_seat, new_per_seat;

  // Derived from the sizes above by Divide.
  int32_t segment;      // entries of a block, a multiple of 32
  int32_t run;          // entries of a warp, a multiple of 32
  int32_t dealt;        // slots dealt to a block, a multiple of kChunk
  int32_t adjacent;     // slots of a block where they are cut in order, a multiple of 32
  bool is_list_shared;  // what the mentions were found to be is kept in shared memory; else in `slots`
  bool are_keys_shared; // the priorities of the slots dealt to a block are kept in shared memory; else read again
};

// Of one block. The fields named `of_blocks` are written by every block into every other.
template <int kBlocks>
struct alignas(16) AllocateShared {
  uint64_t proposed_of_blocks[kCandidates];  // [block][rank], (priority, slot), ascending
  uint64_t chosen[kCandidates];
  uint32_t histogram[2][kBins];
  uint32_t digits[kDigits];
  uint32_t warp_digits[kWarps][kDigits];
  int32_t digit_start[kDigits];
  int32_t taken[kCandidates];
  Range ranges[kWarps];
  uint64_t bounds[8];
  int32_t proposals_of_blocks[kBlocks];  // how many, or -1: more than there was room for
  int32_t new_of_blocks[kBlocks];
  int32_t first_of_blocks[kBlocks];
  int32_t fill_of_blocks[kBlocks];
  int32_t free_of_blocks[kBlocks];
  int32_t used_of_blocks[kBlocks];
  int32_t taken_of_blocks[kBlocks];
  Range range_of_blocks[kBlocks];
  int32_t missing_of_all;  // mentions, counted by every block for every other
  int32_t hits;            // of this block's mentions
  int32_t warp_new[kWarps];
  int32_t warp_first[kWarps];
  int32_t warp_fill[kWarps];
  int32_t totals[kWarps];
  int32_t first_before[kBlocks];
  int32_t count;
  int32_t bin, bin_before, bin_size;
};

template <int kBlocks>
struct Block {
  const AllocateTask& task;
  int rank;
  int begin, run_begin, run_end;  // entries of the list: of the block, and of the warp
  AllocateShared<kBlocks>& shared;
  uint32_t* is_protected;  // bit of each slot dealt to this block; set beyond the last slot
  uint32_t* is_adjacent_protected;
  int32_t* keys;
  int32_t* seen;  // of each entry of the segment: its slot, NO_SLOT for padding, below it the marker of a missing row

  __device__ explicit Block(const AllocateTask& of_task)
      : task(of_task),
        rank(static_cast<int>(BlockOfCluster())),
        begin(Within(static_cast<int64_t>(rank) * task.segment)),
        run_begin(Within(begin + static_cast<int64_t>(min(Warp() * task.run, task.segment)))),
        run_end(Within(begin + static_cast<int64_t>(min((Warp() + 1) * task.run, task.segment)))),
        shared(*reinterpret_cast<AllocateShared<kBlocks>*>(SharedMemory())) {
    std::byte* next = SharedMemory() + sizeof(AllocateShared<kBlocks>);
    // Four words a chunk: what follows stays aligned to 16 bytes.
    is_protected = reinterpret_cast<uint32_t*>(next);
    next += task.dealt / 8;
    keys = reinterpret_cast<int32_t*>(next);
    if (task.are_keys_shared) next += task.dealt * static_cast<int64_t>(sizeof(int32_t));
    is_adjacent_protected = reinterpret_cast<uint32_t*>(next);
    next += task.adjacent / 8;
    seen = task.is_list_shared ? reinterpret_cast<int32_t*>(next) : task.slots + begin;
  }

  __device__ int Within(int64_t entry) const { return static_cast<int>(min(entry, static_cast<int64_t>(task.length))); }

  __device__ int SlotAt(int dealt) const { return (dealt / kChunk * kBlocks + rank) * kChunk + dealt % kChunk; }
  __device__ static int OwnerOf(int slot) { return slot / kChunk % kBlocks; }
  __device__ static int DealtAt(int slot) { return slot / (kChunk * kBlocks) * kChunk + slot % kChunk; }

  __device__ bool IsRow(int32_t row) const { return row >= 0 && row < task.host_rows; }
  __device__ int32_t MarkerOf(int mention) const { return mention - task.length - 1; }
  __device__ int MentionOf(int32_t marker) const { return marker + task.length + 1; }
  __device__ bool IsNew(int mention) const {
    return task.new_per_seat > 0 && mention % task.per_seat < task.new_per_seat;
  }

  // Scratch by mention.
  __device__ int32_t* place() const { return task.scratch; }                        // lowest place in staged
  __device__ int32_t* best() const { return task.scratch + static_cast<int64_t>(task.length); }  // highest priority given
  __device__ int32_t* order() const { return task.scratch + 2 * static_cast<int64_t>(task.length); }  // rank in its block
  // Scratch of the sort: keys and slots, twice.
  __device__ uint32_t* sort_keys(int which) const {
    return reinterpret_cast<uint32_t*>(task.scratch + (3 + 2 * which) * static_cast<int64_t>(task.length));
  }
  __device__ int32_t* sort_slots(int which) const { return task.scratch + (4 + 2 * which) * static_cast<int64_t>(task.length); }
};

inline AllocateTask TaskOf(const AllocateViews& list) {
  AllocateTask task{};
  task.slot_of = list.maps.slot_of;
  task.host_of = list.maps.host_of;
  task.priority = list.maps.priority;
  task.free = list.maps.free;
  task.rows = list.rows;
  task.touched = list.touched;
  task.staged = list.staged;
  task.slots = list.slots;
  task.fill_rows = list.fill_rows;
  task.fill_slots = list.fill_slots;
  task.fill_mention = list.fill_mention;
  task.fill_source = list.fill_source;
  task.counts = list.counts;
  task.scratch = list.scratch;
  task.host_rows = static_cast<int32_t>(list.maps.host_rows);
  task.device_slots = static_cast<int32_t>(list.maps.device_slots);
  task.length = static_cast<int32_t>(list.length);
  task.staged_length = static_cast<int32_t>(list.staged_length);
  task.per_seat = static_cast<int32_t>(list.per_seat);
  task.new_per_seat = static_cast<int32_t>(list.new_per_seat);
  return task;
}

template <int kBlocks>
constexpr int64_t SharedBytes(const AllocateTask& task) {
  return static_cast<int64_t>(sizeof(AllocateShared<kBlocks>)) + task.dealt / 8 + task.adjacent / 8 +
         (task.are_keys_shared ? 4 * int64_t{task.dealt} : 0) + (task.is_list_shared ? 4 * int64_t{task.segment} : 0);
}

// Cuts the list and the slots, and keeps in shared memory what fits into `limit` bytes of it. False where not even the
// marks of protection do.
template <int kBlocks>
bool Divide(AllocateTask* task, int64_t limit) {
  const auto up = [](int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; };
  const int64_t blocks = kBlocks, warps = kWarps;
  task->segment = static_cast<int32_t>(up((task->length + blocks - 1) / blocks, 32));
  task->run = static_cast<int32_t>(up((task->segment + warps - 1) / warps, 32));
  task->dealt = static_cast<int32_t>(up(task->device_slots, kChunk * blocks) / blocks);
  task->adjacent = static_cast<int32_t>(up((task->device_slots + blocks - 1) / blocks, 32));
  task->is_list_shared = task->are_keys_shared = false;
  if (SharedBytes<kBlocks>(*task) > limit) return false;
  task->are_keys_shared = true;
  if (SharedBytes<kBlocks>(*task) > limit) task->are_keys_shared = false;
  task->is_list_shared = true;
  if (SharedBytes<kBlocks>(*task) > limit) task->is_list_shared = false;
  return true;
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_TASK_CUH_
