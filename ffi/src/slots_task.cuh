// What one launch of the slot manager works on: its operands, who owns which part of them, and the shared memory of a
// block. Knows sizes and places; decides nothing.
//
// One cluster does it all. The list is cut into segments, one a block, and those into runs, one a warp, so that order
// within the list is order of (block, warp, round, lane). The slots are cut in order too, a part to each block.
#ifndef ECHO_FFI_SLOTS_TASK_CUH_
#define ECHO_FFI_SLOTS_TASK_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cluster.cuh"
#include "echo_ffi/slots.h"
#include "find_kth.cuh"

namespace echo_ffi {

inline constexpr int kBins = 1024;           // of a histogram of order keys: one a thread
inline constexpr int kDigits = 256;          // of a pass of the sort
inline constexpr int kSamples = 4096;        // slots from which a bound of the lowest ones is guessed
inline constexpr int kMostCandidates = 4096;  // slots below a guessed bound
inline constexpr int kMostGuessed = kThreads;  // slots that are taken by a guess; one counts on more by the full method

struct AllocateTask {
  int32_t *slot_of, *host_of, *priority;
  bool* free;
  const int32_t *rows, *touched, *staged;          // without rows:
  const int32_t *new_rows, *table, *positions;     // as AllocateViews has them
  int32_t *slots, *fill_rows, *fill_slots, *fill_mention, *fill_source, *scratch;
  int32_t* counts[kCounts];
  int32_t host_rows, device_slots, length, staged_length, per_seat, new_per_seat, table_width;
  bool are_fills_a_result;  // -1 stands behind the last of them; else they say nothing there

  // Derived from the sizes above by Divide.
  uint32_t* sort_keys[2];
  int32_t* sort_slots[2];
  int32_t segment;       // entries of a block, a multiple of 32
  int32_t run;           // entries of a warp, a multiple of 32
  int32_t adjacent;      // slots of a block, a multiple of 32
  bool are_keys_shared;  // their priorities are kept in shared memory; else read again
  bool is_list_shared;   // what the mentions were found to be is kept in shared memory; else in scratch
};

// Of one block that chooses slots among all. The fields named `of_blocks` are written by every block into every other.
template <int kBlocks>
struct SelectShared {
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

// Of one block that chooses slots below a guessed bound.
template <int kBlocks>
struct GuessShared {
  union {
    struct {
      uint32_t samples[kSamples];  // keys of all blocks' samples in order of slots, the lowest priority the highest key
      top_k::Scratch kth;
      uint32_t lows[kWarps], highs[kWarps];
      int32_t totals[kWarps];
    };
    uint64_t all[kMostCandidates];  // of all blocks
  };
  uint64_t own[kMostCandidates];
  int32_t taken[kMostGuessed];  // slots by rank
  int32_t own_count;
  int32_t bound_slot;
  int32_t count_of_blocks[kBlocks];
};

// What a block found when it looked its mentions up.
struct alignas(16) Found {
  int32_t hits;
  int32_t missing;   // mentions
  int32_t fresh;     // new rows
  int32_t repeated;  // does a mention name a slot that another one named before it?
};

template <int kBlocks>
struct alignas(16) AllocateShared {
  union {
    SelectShared<kBlocks> select;
    GuessShared<kBlocks> guess;
  };
  Found found;
  Found found_of_blocks[kBlocks];
  int32_t first_of_blocks[kBlocks];
  int32_t fill_of_blocks[kBlocks];
  int32_t first_before[kBlocks];
  int32_t warp_first[kWarps];
  int32_t warp_fill[kWarps];
};

template <int kBlocks>
struct Block {
  const AllocateTask& task;
  AllocateShared<kBlocks>& shared;
  int rank;
  int begin, run_begin, run_end;  // entries of the list: of the block, and of the warp
  int32_t* keys;                  // priorities of the block's slots
  uint32_t* is_protected;         // a bit of each; set beyond the last slot
  int32_t* seen;  // of each entry of the segment: its slot, NO_SLOT for padding, below it the marker of a missing row

  __device__ explicit Block(const AllocateTask& of_task)
      : task(of_task),
        shared(*reinterpret_cast<AllocateShared<kBlocks>*>(SharedMemory())),
        rank(static_cast<int>(BlockOfCluster())),
        begin(Within(static_cast<int64_t>(rank) * task.segment)),
        run_begin(Within(begin + static_cast<int64_t>(min(Warp() * task.run, task.segment)))),
        run_end(Within(begin + static_cast<int64_t>(min((Warp() + 1) * task.run, task.segment)))) {
    std::byte* memory = SharedMemory() + sizeof(AllocateShared<kBlocks>);
    keys = reinterpret_cast<int32_t*>(memory);
    if (task.are_keys_shared) memory += task.adjacent * int64_t{4};
    is_protected = reinterpret_cast<uint32_t*>(memory);
    memory += words() * int64_t{4};
    seen = task.is_list_shared ? reinterpret_cast<int32_t*>(memory) : Scratch(8) + begin;
  }

  __device__ int Within(int64_t entry) const { return static_cast<int>(min(entry, static_cast<int64_t>(task.length))); }

  __device__ bool IsRow(int32_t row) const { return row >= 0 && row < task.host_rows; }
  __device__ bool IsSlot(int32_t slot) const { return slot >= 0 && slot < task.device_slots; }
  __device__ int32_t MarkerOf(int mention) const { return mention - task.length - 1; }
  __device__ int MentionOf(int32_t marker) const { return marker + task.length + 1; }
  __device__ bool IsNew(int mention) const {
    return task.new_per_seat > 0 && mention % task.per_seat < task.new_per_seat;
  }

  // What says which row a mention names: the row itself, or a position of the seat's table.
  __device__ const int32_t* SaidAt(int mention, bool* is_position) const {
    *is_position = false;
    if (task.rows != nullptr) return task.rows + mention;
    const int seat = mention / task.per_seat, at = mention - seat * task.per_seat - task.new_per_seat;
    if (at < 0) return task.new_rows + (seat + 1) * task.new_per_seat + at;
    *is_position = true;
    return task.positions + seat * (task.per_seat - task.new_per_seat) + at;
  }
  __device__ int32_t RowOf(int mention, int32_t position) const {
    if (position < 0 || position >= task.table_width) return kNoRow;
    return task.table[mention / task.per_seat * static_cast<int64_t>(task.table_width) + position];
  }
  __device__ void GiveSlot(int mention, int32_t slot) const {
    if (task.rows != nullptr) {
      task.slots[mention] = slot;
      return;
    }
    const int seat = mention / task.per_seat, at = mention - seat * task.per_seat - task.new_per_seat;
    if (at >= 0) task.slots[seat * (task.per_seat - task.new_per_seat) + at] = slot;
  }

  // The block's slots: words of 32, its first one, and how many there are.
  __device__ int words() const { return task.adjacent / 32; }
  __device__ int64_t first_slot() const { return static_cast<int64_t>(rank) * task.adjacent; }
  __device__ int own_slots() const {
    const int64_t left = task.device_slots - first_slot();
    return static_cast<int>(max(min(left, static_cast<int64_t>(task.adjacent)), int64_t{0}));
  }

  // Scratch by mention.
  __device__ int32_t* Scratch(int part) const { return task.scratch + part * static_cast<int64_t>(task.length); }
  __device__ int32_t* place() const { return Scratch(0); }  // lowest place in staged
  __device__ int32_t* best() const { return Scratch(1); }   // highest priority given
  __device__ int32_t* order() const { return Scratch(2); }  // rank in its block
  __device__ int32_t* row() const { return Scratch(7); }    // of missing and of new ones
};

inline AllocateTask TaskOf(const AllocateViews& list, bool are_fills_a_result) {
  AllocateTask task{};
  task.slot_of = list.maps.slot_of;
  task.host_of = list.maps.host_of;
  task.priority = list.maps.priority;
  task.free = list.maps.free;
  task.rows = list.rows;
  task.touched = list.touched;
  task.staged = list.staged;
  task.new_rows = list.new_rows;
  task.table = list.table;
  task.positions = list.positions;
  task.slots = list.slots;
  task.fill_rows = list.fill_rows;
  task.fill_slots = list.fill_slots;
  task.fill_mention = list.fill_mention;
  task.fill_source = list.fill_source;
  for (int which = 0; which < kCounts; ++which) task.counts[which] = list.counts[which];
  task.scratch = list.scratch;
  task.host_rows = static_cast<int32_t>(list.maps.host_rows);
  task.device_slots = static_cast<int32_t>(list.maps.device_slots);
  task.length = static_cast<int32_t>(list.length);
  task.staged_length = static_cast<int32_t>(list.staged_length);
  task.per_seat = static_cast<int32_t>(list.per_seat);
  task.new_per_seat = static_cast<int32_t>(list.new_per_seat);
  task.table_width = static_cast<int32_t>(list.table_width);
  task.are_fills_a_result = are_fills_a_result;
  return task;
}

constexpr int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

template <int kBlocks>
constexpr int64_t SharedBytes(const AllocateTask& task) {
  return static_cast<int64_t>(sizeof(AllocateShared<kBlocks>)) + task.adjacent / 8 +
         (task.are_keys_shared ? 4 * int64_t{task.adjacent} : 0) + (task.is_list_shared ? 4 * int64_t{task.segment} : 0);
}

// Cuts the list and the slots among the blocks of a cluster, and keeps in shared memory what `limit` bytes hold: the slots'
// priorities first, then what is known of the entries. False where not even the marks of protection fit.
template <int kBlocks>
bool Divide(AllocateTask* task, int64_t limit) {
  const int64_t length = task->length, blocks = kBlocks, warps = kWarps;
  task->segment = static_cast<int32_t>(RoundUp((length + blocks - 1) / blocks, 32));
  task->run = static_cast<int32_t>(RoundUp((task->segment + warps - 1) / warps, 32));
  for (int which = 0; which < 2; ++which) {  // scratch 3 to 6 of Block::Scratch
    task->sort_keys[which] = reinterpret_cast<uint32_t*>(task->scratch + (3 + 2 * which) * length);
    task->sort_slots[which] = task->scratch + (4 + 2 * which) * length;
  }
  task->adjacent = static_cast<int32_t>(RoundUp((int64_t{task->device_slots} + blocks - 1) / blocks, 32));
  task->is_list_shared = false;
  task->are_keys_shared = true;
  if (SharedBytes<kBlocks>(*task) > limit) task->are_keys_shared = false;
  if (SharedBytes<kBlocks>(*task) > limit) return false;
  task->is_list_shared = true;
  if (SharedBytes<kBlocks>(*task) > limit) task->is_list_shared = false;
  return true;
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_TASK_CUH_
