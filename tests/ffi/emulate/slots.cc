// The kernel of ffi/src/slots_kernel.cuh on the emulated GPU, for test_ffi_slots.py to call.
#include <cstdint>
#include <cstring>
#include <exception>

#include "slots_kernel.cuh"

namespace {

template <int kBlocks>
void Run(echo_ffi::AllocateTask task, int64_t shared_limit, uint64_t seed) {
  if (!echo_ffi::Divide<kBlocks>(&task, shared_limit)) throw std::runtime_error("the limit is too small");
  emulate::Gpu gpu(kBlocks, static_cast<size_t>(echo_ffi::SharedBytes<kBlocks>(task)), seed);
  gpu.Run([&] { echo_ffi::AllocateInCluster<kBlocks>(task); });
}

}  // namespace

extern "C" {

// Operands as in targets.h, in the order of AllocateTask; sizes: host_rows, device_slots, length, staged_length, per_seat,
// new_per_seat. Writes what went wrong into error[200], or nothing.
void EmulateAllocate(int32_t* const* numbers, bool* free, const int32_t* sizes, int blocks, int64_t shared_limit,
                     uint64_t seed, char* error) {
  echo_ffi::AllocateTask task{};
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
  task.counts = numbers[11];
  task.scratch = numbers[12];
  task.host_rows = sizes[0];
  task.device_slots = sizes[1];
  task.length = sizes[2];
  task.staged_length = sizes[3];
  task.per_seat = sizes[4];
  task.new_per_seat = sizes[5];
  try {
    if (blocks == 2) Run<2>(task, shared_limit, seed);
    if (blocks == 8) Run<8>(task, shared_limit, seed);
    if (blocks == 16) Run<16>(task, shared_limit, seed);
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), 199);
  }
}

int64_t EmulateSharedBytes() { return static_cast<int64_t>(sizeof(echo_ffi::AllocateShared<16>)); }

}  // extern "C"
