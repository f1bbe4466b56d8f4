// What each target asks of the kernel that moves rows: a list of jobs. Knows pools, slots and the numbers in lists, and
// judges those numbers here, on the device: an entry outside its pool is skipped (read_rows: zeros), a layer outside the
// pool leaves nothing to do. Every offset is 64-bit.
#ifndef ECHO_FFI_ROWS_JOBS_CUH_
#define ECHO_FFI_ROWS_JOBS_CUH_

#include <cstddef>
#include <cstdint>

#include "echo_ffi/targets.h"
#include "rows_kernel.cuh"

namespace echo_ffi {

// `count` records, one after the other.
struct DeviceRecords {
  std::byte* data;
  int64_t count;
  int64_t bytes;

  __device__ bool Has(int64_t index) const { return index >= 0 && index < count; }
  __device__ std::byte* At(int64_t index) const { return data + index * bytes; }
};

struct DevicePool {
  std::byte* data;
  int64_t layers;
  int64_t rows;
  int64_t bytes;

  __device__ bool HasLayer(int64_t layer) const { return layer >= 0 && layer < layers; }
  __device__ bool HasRow(int64_t row) const { return row >= 0 && row < rows; }
  __device__ std::byte* At(int64_t layer, int64_t row) const { return data + (layer * rows + row) * bytes; }
  __device__ bool Holds(const std::byte* at) const { return at >= data && at < data + layers * rows * bytes; }
};

struct RecallJobs {
  using Memory = ReadOnly;
  DeviceRecords records, fresh, staged;
  DevicePool pool;
  const int32_t *layer, *count, *host_rows, *slots, *source;
  int64_t length;

  __device__ int64_t Limit() const {
    return pool.HasLayer(*layer) ? min(static_cast<int64_t>(*count), length) : 0;
  }

  __device__ Move At(int64_t job) const {
    const int64_t row = host_rows[job], slot = slots[job], from = source[job], of_layer = *layer;
    if (!pool.HasRow(row) || !records.Has(slot)) return {};
    if (from == kSourceHost) {
      return pool.HasLayer(of_layer) ? Move{pool.At(of_layer, row), records.At(slot)} : Move{};
    }
    if (fresh.Has(from)) return {fresh.At(from), records.At(slot)};
    if (staged.Has(from - fresh.count)) return {staged.At(from - fresh.count), records.At(slot)};
    return {};
  }

  __device__ bool IsFar(const Move& move) const { return pool.Holds(move.from); }
};

struct ReadRowsJobs {
  using Memory = ReadOnly;
  DeviceRecords out;
  DevicePool pool;
  const int32_t *layer, *rows;
  int64_t entries;  // of each layer
  int64_t length;

  __device__ int64_t Limit() const { return length; }

  __device__ Move At(int64_t job) const {
    const int64_t row = rows[job], of_layer = layer[job / entries];
    const bool is_there = pool.HasRow(row) && pool.HasLayer(of_layer);
    return {is_there ? pool.At(of_layer, row) : nullptr, out.At(job)};
  }
};

// A job for each layer and entry, layer after layer: entries that are neighbours in a layer travel together.
struct WriteBackJobs {
  using Memory = ReadOnly;
  DeviceRecords records;
  DevicePool pool;
  const int32_t* rows;
  int64_t entries;
  int64_t length;

  __device__ int64_t Limit() const { return length; }

  __device__ Move At(int64_t job) const {
    const int64_t layer = job / entries, row = rows[job % entries];
    return pool.HasRow(row) ? Move{records.At(job), pool.At(layer, row)} : Move{};
  }
};

struct CopyRowsJobs {
  using Memory = ReadWrite;
  DevicePool pool;
  const int32_t *source, *target;
  int64_t entries;
  int64_t length;

  __device__ int64_t Limit() const { return length; }

  __device__ Move At(int64_t job) const {
    const int64_t layer = job / entries, from = source[job % entries], to = target[job % entries];
    if (!pool.HasRow(from) || !pool.HasRow(to) || from == to) return {};
    return {pool.At(layer, from), pool.At(layer, to)};
  }
};

}  // namespace echo_ffi

#endif  // ECHO_FFI_ROWS_JOBS_CUH_
