// The kernels of ffi/src/slots_kernel.cuh on the emulated GPU, for test_ffi_slots.py to call. Clusters run one after the
// other, in a drawn order: none of them waits for another, so any order is one that a GPU may choose.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <vector>

#include "slots_kernel.cuh"

namespace {

template <int kBlocks>
void Nominate(echo_ffi::NominateTask task, int64_t shared_limit, uint64_t seed) {
  if (!echo_ffi::Divide<kBlocks>(&task, shared_limit)) throw std::runtime_error("the limit is too small");
  emulate::Gpu gpu(kBlocks, static_cast<size_t>(echo_ffi::SharedBytes<kBlocks>(task)), seed);
  gpu.Run([&] { echo_ffi::NominateInCluster<kBlocks>(task); });
}

template <int kBlocks>
void Allocate(echo_ffi::AllocateTask task, int64_t shared_limit, int clusters, uint64_t seed) {
  if (!echo_ffi::Divide<kBlocks>(&task, shared_limit, clusters)) throw std::runtime_error("the limit is too small");
  // As many as asked for, though a short list does not need them.
  task.clusters = clusters;
  const int64_t blocks = int64_t{clusters} * kBlocks;
  task.looked = static_cast<int32_t>(echo_ffi::RoundUp((task.length + blocks - 1) / blocks, 32));
  std::vector<int> order(task.clusters);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  for (const int cluster : order) {
    emulate::Gpu gpu(kBlocks, static_cast<size_t>(echo_ffi::SharedBytes<kBlocks>(task)), seed + cluster);
    gpu.Run([&] { echo_ffi::AllocateInGrid<kBlocks>(task, cluster); });
  }
}

template <typename Function>
void Guarded(char* error, Function function) {
  try {
    function();
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), 199);
  }
}

}  // namespace

extern "C" {

// Operands as in targets.h; sizes: device_slots, nominated. Writes what went wrong into error[200], or nothing.
void EmulateNominate(int32_t* const* numbers, const int32_t* sizes, int blocks, int64_t shared_limit, uint64_t seed,
                     char* error) {
  echo_ffi::NominateTask task{};
  task.select.priority = numbers[0];
  task.nominees = numbers[1];
  task.marks = reinterpret_cast<uint32_t*>(numbers[2]);
  task.select.device_slots = sizes[0];
  task.nominated = sizes[1];
  Guarded(error, [&] {
    if (blocks == 2) Nominate<2>(task, shared_limit, seed);
    if (blocks == 8) Nominate<8>(task, shared_limit, seed);
  });
}

// Operands as in targets.h; sizes: host_rows, device_slots, length, staged_length, per_seat, new_per_seat, nominated.
void EmulateAllocate(int32_t* const* numbers, bool* free, const int32_t* sizes, int blocks, int clusters,
                     int64_t shared_limit, uint64_t seed, char* error) {
  echo_ffi::AllocateTask task{};
  task.slot_of = numbers[0];
  task.host_of = numbers[1];
  task.select.priority = numbers[2];
  task.free = free;
  task.rows = numbers[3];
  task.touched = numbers[4];
  task.staged = numbers[5];
  task.nominees = numbers[6];
  task.marks = reinterpret_cast<uint32_t*>(numbers[7]);
  task.slots = numbers[8];
  task.fill_rows = numbers[9];
  task.fill_slots = numbers[10];
  task.fill_mention = numbers[11];
  task.fill_source = numbers[12];
  for (int which = 0; which < echo_ffi::kCounts; ++which) task.counts[which] = numbers[13 + which];
  task.scratch = numbers[13 + echo_ffi::kCounts];
  task.host_rows = sizes[0];
  task.select.device_slots = sizes[1];
  task.length = sizes[2];
  task.staged_length = sizes[3];
  task.per_seat = sizes[4];
  task.new_per_seat = sizes[5];
  task.nominated = sizes[6];
  Guarded(error, [&] {
    if (blocks == 2) Allocate<2>(task, shared_limit, clusters, seed);
    if (blocks == 8) Allocate<8>(task, shared_limit, clusters, seed);
    if (blocks == 16) Allocate<16>(task, shared_limit, clusters, seed);
  });
}

// What a block needs beside what grows with the pool and the list.
int64_t EmulateAllocateBytes() { return static_cast<int64_t>(sizeof(echo_ffi::AllocateShared<16>)); }
int64_t EmulateNominateBytes() { return static_cast<int64_t>(sizeof(echo_ffi::NominateShared<16>)); }

}  // extern "C"
