// The kernels of ffi/src/slots_kernel.cuh on the emulated GPU, for test_ffi_slots.py to call.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "gpu.h"

static bool has_selected;  // whether a kernel since the last call of Emulate came by the point of that name
#define ECHO_PHASE(name) has_selected |= std::string_view(#name) == "Selected"

namespace echo_ffi {

struct ReadOnly {
  template <typename Word>
  static Word Load(const Word* at) {
    return *at;
  }
};
using ReadWrite = ReadOnly;

}  // namespace echo_ffi

#include "slots_kernel.cuh"

namespace {

template <int kBlocks>
void Run(echo_ffi::RequireTask task, int64_t shared_limit, uint64_t seed) {
  echo_ffi::AllocateTask& list = task.allocate;
  if (!echo_ffi::Divide<kBlocks>(&list, shared_limit)) throw std::runtime_error("the limit is too small");
  list.is_look_apart = seed % 3 != 0;
  // Blocks one after the other, whichever comes first, some with more than one chunk.
  std::vector<int> looks(list.is_look_apart ? static_cast<size_t>(list.length / 200 + 1) : 0);
  std::iota(looks.begin(), looks.end(), 0);
  std::shuffle(looks.begin(), looks.end(), std::mt19937_64(seed));
  for (const int block : looks) {
    emulate::Gpu gpu(1, sizeof(echo_ffi::LookShared), seed + static_cast<uint64_t>(block), echo_ffi::kChunk);
    gpu.Run([&] {
      auto& shared = *reinterpret_cast<echo_ffi::LookShared*>(echo_ffi::SharedMemory());
      echo_ffi::LookAtChunks(list, shared, block, static_cast<int>(looks.size()));
    });
  }
  emulate::Gpu gpu(kBlocks, static_cast<size_t>(echo_ffi::SharedBytes<kBlocks>(list)), seed);
  gpu.Run([&] {
    if (list.are_fills_a_result) {
      echo_ffi::AllocateInCluster<kBlocks>(list);
    } else {
      echo_ffi::RequireInCluster<kBlocks>(task);
    }
  });
}

}  // namespace

extern "C" {

// What echo_require moves beside what echo_allocate decides.
struct Moved {
  std::byte *records, *pool, *fresh, *staged;
  const int32_t *layer, *table, *new_rows, *positions;
  int64_t layers, bytes;
  int32_t is_aligned;
};

// Operands as in targets.h, the fills behind `slots`; sizes: host_rows, device_slots, length, staged_length, per_seat,
// new_per_seat, table_width, whether one priority stands for all; moved: null for echo_allocate, else the rows are said by
// table, new_rows and positions. Writes what went wrong into error[200], or nothing.
void Emulate(int32_t* const* numbers, bool* free, const int32_t* sizes, const Moved* moved, int blocks,
             int64_t shared_limit, uint64_t seed, char* error) {
  has_selected = false;
  echo_ffi::RequireTask whole{};
  echo_ffi::AllocateTask& task = whole.allocate;
  task.slot_of = numbers[0];
  task.host_of = numbers[1];
  task.priority = numbers[2];
  task.free = free;
  task.rows = numbers[3];
  task.touched = numbers[4];
  task.staged = numbers[5];
  task.slots = numbers[6];
  task.fill_rows = numbers[7];
  task.fill_slots = numbers[8];
  task.fill_mention = numbers[9];
  task.fill_source = numbers[10];
  for (int which = 0; which < echo_ffi::kCounts; ++which) task.counts[which] = numbers[11 + which];
  task.scratch = numbers[11 + echo_ffi::kCounts];
  task.host_rows = sizes[0];
  task.device_slots = sizes[1];
  task.length = sizes[2];
  task.staged_length = sizes[3];
  task.per_seat = sizes[4];
  task.new_per_seat = sizes[5];
  task.table_width = sizes[6];
  task.is_touched_alike = sizes[7] != 0;
  if (moved != nullptr) {
    task.rows = nullptr;
    task.table = moved->table;
    task.new_rows = moved->new_rows;
    task.positions = moved->positions;
  }
  task.are_fills_a_result = moved == nullptr;
  if (moved != nullptr) {
    const int64_t fresh = int64_t{task.length} / task.per_seat * task.new_per_seat;
    whole.recall = {{moved->records, task.device_slots, moved->bytes},
                    {moved->fresh, fresh, moved->bytes},
                    {moved->staged, task.staged_length, moved->bytes},
                    {moved->pool, moved->layers, task.host_rows, moved->bytes},
                    moved->layer,
                    nullptr,
                    task.fill_rows,
                    task.fill_slots,
                    task.fill_source,
                    task.length};
    whole.is_aligned = moved->is_aligned != 0;
  }
  try {
    if (blocks == 2) Run<2>(whole, shared_limit, seed);
    if (blocks == 8) Run<8>(whole, shared_limit, seed);
    if (blocks == 16) Run<16>(whole, shared_limit, seed);
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), 199);
  }
}

// Whether the last call went through all slots, as it must where a guess is not made or was bad.
int EmulateHasSelected() { return has_selected; }

// What a block needs beside what grows with the pool and the list.
int64_t EmulateAllocateBytes(int blocks) {
  const size_t bytes = blocks == 2   ? sizeof(echo_ffi::AllocateShared<2>)
                       : blocks == 8 ? sizeof(echo_ffi::AllocateShared<8>)
                                     : sizeof(echo_ffi::AllocateShared<16>);
  return static_cast<int64_t>(bytes);
}

// By echo_ffi::Divider.
int Divide(int value, int by) { return echo_ffi::Divider(by).Of(value); }

}  // extern "C"
