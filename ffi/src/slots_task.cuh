// What a call of the slot manager works on: its operands, who owns which part of them, and the shared memory of a block.
// Knows sizes and places; decides nothing.
//
// After the look one cluster does the rest. The list is cut into segments, one a block, and those into runs, one a warp, so
// that order within the list is order of (block, warp, round, lane). The slots are dealt to the blocks by words of 32, in
// turn: those that leave next are often neighbours, as LRU goes round a pool, and no block is to have them all.
#ifndef ECHO_FFI_SLOTS_TASK_CUH_
#define ECHO_FFI_SLOTS_TASK_CUH_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cluster.cuh"
#include "echo_ffi/slots.h"

namespace echo_ffi {

inline constexpr int kBins = 1024;           // of a histogram of order keys: one a thread
inline constexpr int kDigits = 256;          // of a pass of the sort
inline constexpr int kSamples = 4096;        // slots from which a bound of the lowest ones is guessed
inline constexpr int kMostCandidates = 6144;  // slots below a guessed bound
inline constexpr int kGroups = 32;            // of samples of a block, one a lane; the lowest of each are compared
inline constexpr int kMostGuessed = 3072;     // slots that are taken by a guess; one counts on more by the full method
inline constexpr int kChunk = 128;             // entries of a block of a look that is a kernel of its own
inline constexpr int kMostBlocks = 16;         // of the cluster

// Where in a chunk of ByOwner the slots of each block of the cluster begin, one more where they end, and how many entries of
// the chunk are missing rows.
struct alignas(32) ChunkHead {
  uint8_t begin[kMostBlocks + 1];
  uint8_t missing;
};
static_assert(kChunk <= UINT8_MAX);

// Division by a number known at the launch: of 0 <= value < 2^31, in three instructions (Granlund and Montgomery, 1994).
struct Divider {
  uint32_t divisor = 1, magic = 1, shift = 0;

  Divider() = default;
  // A list or a pool of nothing has parts of 0, by which nothing is divided.
  explicit Divider(int32_t by) : divisor(static_cast<uint32_t>(std::max(by, 1))) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }

  __device__ int Of(int value) const {
    const auto n = static_cast<uint32_t>(value);
    return static_cast<int>((static_cast<uint32_t>(uint64_t{n} * magic >> 32) + n) >> shift);
  }
};

struct AllocateTask {
  int32_t *slot_of, *host_of, *priority;
  bool* free;
  const int32_t *rows, *touched, *staged;       // without rows:
  const int32_t *new_rows, *table, *positions;  // as AllocateViews has them
  int32_t *slots, *fill_rows, *fill_slots, *fill_mention, *fill_source, *scratch;
  int32_t* counts[kCounts];
  int32_t host_rows, device_slots, length, staged_length, per_seat, new_per_seat, table_width;
  bool is_touched_alike;    // one priority for all entries
  bool are_fills_a_result;  // -1 stands behind the last of them; else they say nothing there

  // Derived from the sizes above by Divide.
  uint32_t* sort_keys[2];
  int32_t* sort_slots[2];
  int32_t segment;       // entries of a block, a multiple of 32
  int32_t run;           // entries of a warp, a multiple of 32
  int32_t blocks;        // of the cluster, a power of 2
  int32_t words;         // of 32 slots, that a block has
  Divider by_seat, by_new_of_seat, by_segment;
  bool are_keys_shared;  // their priorities are kept in shared memory; else read again
  bool is_list_shared;   // what the block's entries were found to be is kept in shared memory; else in scratch
  bool is_look_apart;    // the look is a kernel of its own

  // Scratch by mention. Parts 3 to 6 are what is sorted; behind part 8, which ends with whole 16 bytes, is Block::seen, and
  // behind that what a look of its own leaves.
  __device__ int32_t* Scratch(int part) const { return scratch + part * static_cast<int64_t>(length); }
  __device__ int32_t* place() const { return Scratch(0); }  // of a missing row: lowest place in staged
  __device__ int32_t* best() const { return Scratch(1); }   // of a missing row: highest priority given
  __device__ int32_t* order() const { return Scratch(2); }  // of a first mention: rank in its block
  __device__ int32_t* row() const { return Scratch(7); }
  // Slot, kNoSlot for padding and up to the next multiple of 4, or kMissing.
  __device__ int32_t* found() const { return Scratch(8); }
  __device__ int found_length() const { return (length + 3) / 4 * 4; }
  __device__ int32_t* seen() const { return found() + found_length(); }
  // The slots that were found in each chunk of the list, in order of the cluster's blocks that own them.
  __device__ int32_t* by_owner() const { return seen() + length; }
  __device__ int count_of_new() const { return by_seat.Of(length) * new_per_seat; }
  __device__ int OwnerOf(int32_t slot) const { return slot / 32 & (blocks - 1); }
  __device__ int chunks() const { return (length + kChunk - 1) / kChunk; }
  __device__ ChunkHead* heads() const {
    const auto end = reinterpret_cast<uintptr_t>(by_owner() + length);
    return reinterpret_cast<ChunkHead*>((end + alignof(ChunkHead) - 1) / alignof(ChunkHead) * alignof(ChunkHead));
  }

  __device__ int32_t Touched(int mention) const { return touched[is_touched_alike ? 0 : mention]; }
  __device__ int32_t MarkerOf(int mention) const { return mention - length - 1; }
  __device__ int MentionOf(int32_t marker) const { return marker + length + 1; }
  __device__ void GiveSlot(int mention, int32_t slot) const;
};

// Of a mention whose row is missing, until the row's marker is read; it is the marker of the last entry of a list too,
// which is no harm: nobody asks in between.
inline constexpr int32_t kMissing = -2;

__device__ inline int32_t Clamped(int32_t priority) { return min(max(priority, INT32_MIN + 1), INT32_MAX - 1); }

// Where in the list of its seat a mention stands.
struct Entry {
  const AllocateTask& task;
  int seat, at;  // at: among the positions, or below 0 for a new row

  __device__ Entry(const AllocateTask& of_task, int mention)
      : task(of_task), seat(of_task.by_seat.Of(mention)), at(mention - seat * of_task.per_seat - of_task.new_per_seat) {}

  __device__ bool IsNew() const { return at < 0; }
  __device__ int AmongNew() const { return (seat + 1) * task.new_per_seat + at; }
  __device__ int AmongPositions() const { return seat * (task.per_seat - task.new_per_seat) + at; }
};

// Slots are listed for all mentions, or for the positions alone.
__device__ inline void AllocateTask::GiveSlot(int mention, int32_t slot) const {
  if (rows != nullptr) {
    slots[mention] = slot;
    return;
  }
  const Entry of_seat(*this, mention);
  if (!of_seat.IsNew()) slots[of_seat.AmongPositions()] = slot;
}

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
  uint32_t of_words[2][kBins];  // slots of each word that are below the last key, and 2^16 times those with it
  int32_t below_before[kBins];  // the same of all words before
  int32_t ties_before[kBins];
  int32_t totals[kWarps];
  int32_t bin, bin_before, bin_size;
};

// Of one block that chooses slots below a guessed bound. A slot stands here as its place in the order of (priority, slot).
template <int kBlocks>
struct GuessShared {
  static constexpr int kRoom = kMostCandidates / kBlocks;  // for the candidates of one block
  static constexpr int kFew = kBlocks >= 16 ? 16 : 32;     // lows of a block, among which a high rank is looked for

  uint64_t lows[kWarps][kGroups];              // the lowest sample of each warp and group
  uint64_t low_of_blocks[kBlocks][kGroups];    // and of each block; where one slot is wanted, its lowest slot in [0]
  uint64_t few[kBlocks][kFew];
  int32_t rank_of_few[kBlocks * kFew];
  uint64_t bound;
  uint64_t own[kRoom];                         // candidates
  uint64_t of_blocks[kBlocks][kRoom];  // ascending
  int32_t rank[kRoom];                 // of own: in the block, then among all
  int32_t taken[kMostGuessed];         // slots by rank
  int32_t own_count;
  int32_t count_of_blocks[kBlocks];
};

// What a block counts of the whole list, and of its own part.
enum Counted : int {
  kMissingRows,  // mentions of rows without a slot, in the list
  kMarked,       // slots of this block that are named
  kRepeated,     // mentions of a slot of this block beyond its first
  kFresh,        // new rows in this block's part
  kFreshBefore,  // and in the parts before it
  kCounted
};

template <int kBlocks>
struct alignas(16) AllocateShared {
  union {
    SelectShared<kBlocks> select;
    GuessShared<kBlocks> guess;
  };
  int32_t warp_counted[kCounted][kWarps];
  int32_t first_of_blocks[kBlocks];
  int32_t fill_of_blocks[kBlocks];
  int32_t first_before[kBlocks];
  int32_t fill_before;  // entries to fill before this block's part of the list
  int32_t fills;        // and in it
  int32_t warp_first[kWarps];
  int32_t warp_fill[kWarps];
};

template <int kBlocks>
struct Block {
  const AllocateTask& task;
  AllocateShared<kBlocks>& shared;
  int rank;
  int begin, end, run_begin, run_end;  // entries of the list: of the block, and of the warp
  int32_t* keys;                       // priorities of the block's slots
  uint32_t* is_protected;  // a bit of each of them; set beyond the last slot
  int32_t* seen;  // of each entry of the segment: as AllocateTask::found, and of a missing row its marker once it is read

  __device__ explicit Block(const AllocateTask& of_task)
      : task(of_task),
        shared(*reinterpret_cast<AllocateShared<kBlocks>*>(SharedMemory())),
        rank(static_cast<int>(BlockOfCluster())),
        begin(Within(static_cast<int64_t>(rank) * task.segment)),
        end(Within(begin + static_cast<int64_t>(task.segment))),
        run_begin(Within(begin + static_cast<int64_t>(min(Warp() * task.run, task.segment)))),
        run_end(Within(begin + static_cast<int64_t>(min((Warp() + 1) * task.run, task.segment)))) {
    std::byte* memory = SharedMemory() + sizeof(AllocateShared<kBlocks>);
    keys = reinterpret_cast<int32_t*>(memory);
    if (task.are_keys_shared) memory += task.words * int64_t{32 * 4};
    seen = task.is_list_shared ? reinterpret_cast<int32_t*>(memory) : task.seen() + begin;
    if (task.is_list_shared) memory += task.segment * int64_t{4};
    is_protected = reinterpret_cast<uint32_t*>(memory);
  }

  __device__ int Within(int64_t entry) const { return static_cast<int>(min(entry, static_cast<int64_t>(task.length))); }

  __device__ bool IsRow(int32_t row) const { return row >= 0 && row < task.host_rows; }
  __device__ bool IsNew(int mention) const { return task.new_per_seat > 0 && Entry(task, mention).IsNew(); }

  // The block's slots by their place among its own; the last places may lie beyond the last slot.
  __device__ int places() const { return task.words * 32; }
  __device__ bool Owns(int32_t slot) const { return slot >= 0 && task.OwnerOf(slot) == rank; }
  __device__ int32_t SlotAt(int place) const { return (place / 32 * kBlocks + rank) * 32 + place % 32; }
  __device__ int PlaceAmongOwn(int32_t slot) const { return slot / (32 * kBlocks) * 32 + slot % 32; }
};

inline AllocateTask TaskOf(const AllocateViews& list, bool are_fills_a_result) {
  AllocateTask task{};
  task.slot_of = list.maps.slot_of;
  task.host_of = list.maps.host_of;
  task.priority = list.maps.priority;
  task.free = list.maps.free;
  task.rows = list.rows;
  task.touched = list.touched;
  task.is_touched_alike = list.is_touched_alike;
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
  return static_cast<int64_t>(sizeof(AllocateShared<kBlocks>)) + 4 * int64_t{task.words} +
         (task.are_keys_shared ? 4 * 32 * int64_t{task.words} : 0) + (task.is_list_shared ? 4 * int64_t{task.segment} : 0);
}

// A list up to which the cluster looks for itself: an entry more or less for each SM costs less than a launch and its gap.
inline constexpr int kShortList = 4096;

// Cuts the list and the slots among the blocks of a cluster, and keeps in shared memory what `limit` bytes hold: the slots'
// priorities first, then what is known of the entries. False where not even the marks of protection fit.
template <int kBlocks>
bool Divide(AllocateTask* task, int64_t limit) {
  const int64_t length = task->length, blocks = kBlocks, warps = kWarps;
  task->is_look_apart = length > kShortList;
  task->segment = static_cast<int32_t>(RoundUp((length + blocks - 1) / blocks, 32));
  task->run = static_cast<int32_t>(RoundUp((task->segment + warps - 1) / warps, 32));
  for (int which = 0; which < 2; ++which) {  // scratch 3 to 6
    task->sort_keys[which] = reinterpret_cast<uint32_t*>(task->scratch + (3 + 2 * which) * length);
    task->sort_slots[which] = task->scratch + (4 + 2 * which) * length;
  }
  task->blocks = kBlocks;
  task->words = static_cast<int32_t>((int64_t{task->device_slots} + 32 * blocks - 1) / (32 * blocks));
  task->by_seat = Divider(task->per_seat);
  task->by_new_of_seat = Divider(std::max(task->new_per_seat, 1));
  task->by_segment = Divider(task->segment);
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
