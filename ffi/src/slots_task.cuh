// What one launch of the slot manager works on: its operands, who owns which part of them, and the shared memory of a
// block. Knows sizes and places; decides nothing.
//
// The list is cut twice. All blocks of the grid look at a part of it each. Where one cluster settles what they found, the
// list is cut into segments, one a block of that cluster, and those into runs, one a warp, so that order within the list is
// order of (block, warp, round, lane). The slots are cut in order, a part to each block of a cluster.
#ifndef ECHO_FFI_SLOTS_TASK_CUH_
#define ECHO_FFI_SLOTS_TASK_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cluster.cuh"
#include "echo_ffi/slots.h"

namespace echo_ffi {

inline constexpr int kBins = 1024;        // of a histogram of order keys: one a thread
inline constexpr int kDigits = 256;       // of a pass of the sort
inline constexpr int kFew = kThreads;     // missing and new mentions that one block settles
inline constexpr int kPlaces = 2 * kFew;  // of its table of rows
inline constexpr int kLooksPerBlock = 512;  // mentions: half a block's threads hide each other's latency well enough
inline constexpr int kMostBlocks = 128;     // of a grid

// What slots are chosen from, and where the chosen ones are sorted.
struct SelectTask {
  int32_t* priority;
  int32_t device_slots;
  uint32_t* sort_keys[2];
  int32_t* sort_slots[2];
  int32_t adjacent;      // slots of a block, a multiple of 32
  bool are_keys_shared;  // their priorities are kept in shared memory; else read again
};

struct NominateTask {
  SelectTask select;
  int32_t* nominees;
  uint32_t* marks;
  int32_t nominated;
};

struct AllocateTask {
  SelectTask select;
  int32_t *slot_of, *host_of;
  bool* free;
  const int32_t *rows, *touched, *staged, *nominees;
  uint32_t* marks;
  int32_t *slots, *fill_rows, *fill_slots, *fill_mention, *fill_source, *scratch;
  int32_t* counts[kCounts];
  int32_t host_rows, length, staged_length, per_seat, new_per_seat, nominated;

  // Derived from the sizes above by Divide.
  int32_t clusters;
  int32_t looked;       // entries that a block of the grid looks at, a multiple of 32
  int32_t segment;      // entries of a block of the cluster that settles, a multiple of 32
  int32_t run;          // entries of a warp, a multiple of 32
  bool is_list_shared;  // what the mentions were found to be is kept in shared memory; else in `slots`
};

// Of one block that chooses slots. The fields named `of_blocks` are written by every block into every other.
template <int kBlocks>
struct alignas(16) SelectShared {
  uint32_t histogram[2][kBins];
  uint32_t digits[kDigits];
  uint32_t warp_digits[kWarps][kDigits];
  int32_t digit_start[kDigits];
  Range ranges[kWarps];
  Range range_of_blocks[kBlocks];
  int32_t free_of_blocks[kBlocks];
  int32_t used_of_blocks[kBlocks];
  int32_t taken_of_blocks[kBlocks];
  int32_t totals[kWarps];
  int32_t bin, bin_before, bin_size;
};

// Of one block that nominates.
template <int kBlocks>
struct alignas(16) NominateShared {
  SelectShared<kBlocks> select;
  uint64_t own[kMostNominees];  // keys of this block's
  uint64_t all[kMostNominees];  // and of all blocks'
  int32_t named_of_blocks[kBlocks];
  int32_t named;
};

// What one block needs to settle few missing rows: them, in a table by row, and the slots they take.
struct FewShared {
  int32_t listed[kFew];  // mentions that are missing or new, in list order
  int32_t row[kPlaces];
  int32_t first[kPlaces];  // mention
  int32_t best[kPlaces];   // highest priority given
  int32_t place[kPlaces];  // lowest in staged
  int32_t order[kPlaces];  // rank among missing rows
  int32_t taken[kFew];
  int32_t victim[kFew];  // who leaves the slot
  int32_t totals[3][kWarps];
  int32_t useful, recalled, written, evicted;
};

template <int kBlocks>
struct alignas(16) AllocateShared {
  union {
    SelectShared<kBlocks> select;
    FewShared few;
  };
  uint64_t progress;
  int32_t verdict;  // what is left to do for the cluster of the last block
  int32_t hits;
  int32_t repeated;
  int32_t new_of_blocks[kBlocks];
  int32_t first_of_blocks[kBlocks];
  int32_t fill_of_blocks[kBlocks];
  int32_t first_before[kBlocks];
  int32_t warp_first[kWarps];
  int32_t warp_fill[kWarps];
};

// The slots of one block of a cluster that chooses.
template <int kBlocks>
struct Slots {
  const SelectTask& task;
  SelectShared<kBlocks>& shared;
  int rank;
  int32_t* keys;           // priorities
  uint32_t* is_protected;  // a bit of each; set beyond the last slot

  __device__ Slots(const SelectTask& of_task, SelectShared<kBlocks>& of_shared, std::byte* memory)
      : task(of_task),
        shared(of_shared),
        rank(static_cast<int>(BlockOfCluster())),
        keys(reinterpret_cast<int32_t*>(memory)),
        is_protected(reinterpret_cast<uint32_t*>(memory + (task.are_keys_shared ? task.adjacent * int64_t{4} : 0))) {}

  __device__ int words() const { return task.adjacent / 32; }
  __device__ int64_t first() const { return static_cast<int64_t>(rank) * task.adjacent; }
  __device__ std::byte* end() const { return reinterpret_cast<std::byte*>(is_protected + words()); }
};

template <int kBlocks>
struct Block {
  const AllocateTask& task;
  AllocateShared<kBlocks>& shared;
  Slots<kBlocks> slots;
  int rank;
  int begin, run_begin, run_end;  // entries of the list: of the block, and of the warp
  int32_t* seen;  // of each entry of the segment: its slot, NO_SLOT for padding, below it the marker of a missing row

  __device__ explicit Block(const AllocateTask& of_task)
      : task(of_task),
        shared(*reinterpret_cast<AllocateShared<kBlocks>*>(SharedMemory())),
        slots(task.select, shared.select, SharedMemory() + sizeof(AllocateShared<kBlocks>)),
        rank(slots.rank),
        begin(Within(static_cast<int64_t>(rank) * task.segment)),
        run_begin(Within(begin + static_cast<int64_t>(min(Warp() * task.run, task.segment)))),
        run_end(Within(begin + static_cast<int64_t>(min((Warp() + 1) * task.run, task.segment)))),
        seen(task.is_list_shared ? reinterpret_cast<int32_t*>(slots.end()) : task.slots + begin) {}

  __device__ int Within(int64_t entry) const { return static_cast<int>(min(entry, static_cast<int64_t>(task.length))); }

  __device__ bool IsRow(int32_t row) const { return row >= 0 && row < task.host_rows; }
  __device__ bool IsSlot(int32_t slot) const { return slot >= 0 && slot < task.select.device_slots; }
  __device__ int32_t MarkerOf(int mention) const { return mention - task.length - 1; }
  __device__ int MentionOf(int32_t marker) const { return marker + task.length + 1; }
  __device__ bool IsNew(int mention) const {
    return task.new_per_seat > 0 && mention % task.per_seat < task.new_per_seat;
  }

  // Marks: how far the grid is, and a bit of each slot: protected.
  __device__ uint64_t* progress() const { return reinterpret_cast<uint64_t*>(task.marks); }
  __device__ uint32_t* protected_words() const { return task.marks + kMarksHeader; }

  // Scratch by mention.
  __device__ int32_t* Scratch(int part) const { return task.scratch + part * static_cast<int64_t>(task.length); }
  __device__ int32_t* place() const { return Scratch(0); }  // lowest place in staged
  __device__ int32_t* best() const { return Scratch(1); }   // highest priority given
  __device__ int32_t* order() const { return Scratch(2); }  // rank in its block
  // Scratch of a bit a mention: is it missing or new; does it name a slot that another one named before.
  __device__ uint32_t* wanted_words() const { return reinterpret_cast<uint32_t*>(Scratch(7)); }
  __device__ uint32_t* repeated_words() const { return wanted_words() + (task.length + 31) / 32; }
};

inline AllocateTask TaskOf(const AllocateViews& list) {
  AllocateTask task{};
  task.slot_of = list.maps.slot_of;
  task.host_of = list.maps.host_of;
  task.select.priority = list.maps.priority;
  task.free = list.maps.free;
  task.rows = list.rows;
  task.touched = list.touched;
  task.staged = list.staged;
  task.nominees = list.nominees;
  task.marks = reinterpret_cast<uint32_t*>(list.marks);
  task.slots = list.slots;
  task.fill_rows = list.fill_rows;
  task.fill_slots = list.fill_slots;
  task.fill_mention = list.fill_mention;
  task.fill_source = list.fill_source;
  for (int which = 0; which < kCounts; ++which) task.counts[which] = list.counts[which];
  task.scratch = list.scratch;
  task.host_rows = static_cast<int32_t>(list.maps.host_rows);
  task.select.device_slots = static_cast<int32_t>(list.maps.device_slots);
  task.length = static_cast<int32_t>(list.length);
  task.staged_length = static_cast<int32_t>(list.staged_length);
  task.per_seat = static_cast<int32_t>(list.per_seat);
  task.new_per_seat = static_cast<int32_t>(list.new_per_seat);
  task.nominated = static_cast<int32_t>(list.nominated);
  return task;
}

constexpr int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

constexpr int64_t SelectBytes(const SelectTask& task) {
  return task.adjacent / 8 + (task.are_keys_shared ? 4 * int64_t{task.adjacent} : 0);
}

template <int kBlocks>
constexpr int64_t SharedBytes(const NominateTask& task) {
  return static_cast<int64_t>(sizeof(NominateShared<kBlocks>)) + SelectBytes(task.select);
}

template <int kBlocks>
constexpr int64_t SharedBytes(const AllocateTask& task) {
  return static_cast<int64_t>(sizeof(AllocateShared<kBlocks>)) + SelectBytes(task.select) +
         (task.is_list_shared ? 4 * int64_t{task.segment} : 0);
}

// Cuts the slots among the blocks of a cluster, and keeps their priorities in shared memory where `limit` bytes hold them.
// False where not even the marks of protection fit.
template <int kBlocks, typename Task>
bool DivideSlots(Task* task, int64_t limit) {
  SelectTask& select = task->select;
  select.adjacent = static_cast<int32_t>(RoundUp((int64_t{select.device_slots} + kBlocks - 1) / kBlocks, 32));
  select.are_keys_shared = true;
  if (SharedBytes<kBlocks>(*task) > limit) select.are_keys_shared = false;
  return SharedBytes<kBlocks>(*task) <= limit;
}

template <int kBlocks>
bool Divide(NominateTask* task, int64_t limit) {
  return DivideSlots<kBlocks>(task, limit);
}

// Cuts the list too. `most_clusters` is what the GPU may have to do with other work beside it.
template <int kBlocks>
bool Divide(AllocateTask* task, int64_t limit, int64_t most_clusters = kMostBlocks / kBlocks) {
  const int64_t length = task->length, blocks = kBlocks, warps = kWarps;
  const int64_t clusters = std::clamp((length + blocks * kLooksPerBlock - 1) / (blocks * kLooksPerBlock), int64_t{1},
                                      most_clusters);
  task->clusters = static_cast<int32_t>(clusters);
  task->looked = static_cast<int32_t>(RoundUp((length + clusters * blocks - 1) / (clusters * blocks), 32));
  task->segment = static_cast<int32_t>(RoundUp((length + blocks - 1) / blocks, 32));
  task->run = static_cast<int32_t>(RoundUp((task->segment + warps - 1) / warps, 32));
  for (int which = 0; which < 2; ++which) {  // scratch 3 to 6 of Block::Scratch
    task->select.sort_keys[which] = reinterpret_cast<uint32_t*>(task->scratch + (3 + 2 * which) * length);
    task->select.sort_slots[which] = task->scratch + (4 + 2 * which) * length;
  }
  task->is_list_shared = false;
  if (!DivideSlots<kBlocks>(task, limit)) return false;
  task->is_list_shared = true;
  if (SharedBytes<kBlocks>(*task) > limit) task->is_list_shared = false;
  return true;
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_TASK_CUH_
