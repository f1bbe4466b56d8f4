// What the library's movements of rows are held to, and the library's own kernel in other settings. Bench only.
//
// plain_gather, plain_scatter   one warp a row, 16-byte words, nothing else: the kernel anybody would write first
// moved_gather, moved_scatter   the kernel of ffi/src/rows_kernel.cuh with blocks, rows a warp merges, and order as asked
//
// Records are multiples of 16 bytes here, numbers are in range, and shapes are the caller's promise: this file is compiled
// and registered by plain_rows.py, whose functions keep it.
#include <cuda_runtime.h>

#include <cstdint>

#include "rows_kernel.cuh"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Numbers = ffi::Buffer<ffi::S32>;
using Stream = ffi::PlatformStream<cudaStream_t>;

struct Sizes {
  int64_t layers, rows, words;  // of a pool [layers, rows, words * 16 bytes]
};

Sizes SizesOf(ffi::AnyBuffer pool) {
  const int64_t layers = pool.dimensions()[0], rows = pool.dimensions()[1];
  return {layers, rows, static_cast<int64_t>(pool.size_bytes()) / layers / rows / 16};
}

ffi::Error Launched() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

// ---- plain -----------------------------------------------------------------------------------------------------------

__global__ void PlainGather(const uint4* pool, uint4* records, const int* layer, const int* rows, const int* slots,
                            int length, int64_t pool_rows, int words) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
  for (int m = (blockIdx.x * blockDim.x + threadIdx.x) / 32; m < length; m += warps) {
    const uint4* from = pool + (*layer * pool_rows + rows[m]) * words;
    uint4* to = records + static_cast<int64_t>(slots[m]) * words;
    for (int i = lane; i < words; i += 32) to[i] = from[i];
  }
}

__global__ void PlainScatter(uint4* pool, const uint4* records, const int* rows, int length, int layers,
                             int64_t pool_rows, int words) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * blockDim.x / 32;
  for (int m = (blockIdx.x * blockDim.x + threadIdx.x) / 32; m < length * layers; m += warps) {
    const uint4* from = records + static_cast<int64_t>(m) * words;
    uint4* to = pool + (m / length * pool_rows + rows[m % length]) * words;
    for (int i = lane; i < words; i += 32) to[i] = from[i];
  }
}

ffi::Error RunPlainGather(cudaStream_t stream, ffi::AnyBuffer records, ffi::AnyBuffer pool, Numbers layer, Numbers rows,
                          Numbers slots, ffi::Result<ffi::AnyBuffer>, int64_t blocks) {
  const Sizes sizes = SizesOf(pool);
  PlainGather<<<static_cast<unsigned>(blocks), 1024, 0, stream>>>(
      static_cast<const uint4*>(pool.untyped_data()), static_cast<uint4*>(records.untyped_data()), layer.typed_data(),
      rows.typed_data(), slots.typed_data(), static_cast<int>(rows.element_count()), sizes.rows,
      static_cast<int>(sizes.words));
  return Launched();
}

ffi::Error RunPlainScatter(cudaStream_t stream, ffi::AnyBuffer pool, ffi::AnyBuffer records, Numbers rows,
                           ffi::Result<ffi::AnyBuffer>, int64_t blocks) {
  const Sizes sizes = SizesOf(pool);
  PlainScatter<<<static_cast<unsigned>(blocks), 1024, 0, stream>>>(
      static_cast<uint4*>(pool.untyped_data()), static_cast<const uint4*>(records.untyped_data()), rows.typed_data(),
      static_cast<int>(rows.element_count()), static_cast<int>(sizes.layers), sizes.rows, static_cast<int>(sizes.words));
  return Launched();
}

// ---- the library's kernel in other settings --------------------------------------------------------------------------

struct GatherJobs {
  using Memory = echo_ffi::ReadOnly;
  const std::byte* pool;
  std::byte* records;
  const int32_t *layer, *rows, *slots;
  int64_t pool_rows, bytes, length;

  __device__ int64_t Limit() const { return length; }
  __device__ echo_ffi::Move At(int64_t job) const {
    return {pool + (*layer * pool_rows + rows[job]) * bytes, records + slots[job] * bytes};
  }
};

struct ScatterJobs {
  using Memory = echo_ffi::ReadOnly;
  std::byte* pool;
  const std::byte* records;
  const int32_t* rows;
  int64_t entries, pool_rows, bytes, length;

  __device__ int64_t Limit() const { return length; }
  __device__ echo_ffi::Move At(int64_t job) const {
    return {records + job * bytes, pool + (job / entries * pool_rows + rows[job % entries]) * bytes};
  }
};

// The same jobs in another order: all blocks go through the list side by side, a stripe each of every turn, where the
// kernel by itself gives every block a contiguous share. What is left for the last turn then falls on the first blocks.
template <typename Jobs, int kMerged>
struct InStripes : Jobs {
  static constexpr int64_t kStripe = static_cast<int64_t>(echo_ffi::kBlockWarps) * kMerged;

  __device__ int64_t Turns() const {
    const int64_t turn = gridDim.x * kStripe;
    return (this->length + turn - 1) / turn;
  }
  __device__ int64_t Limit() const { return Turns() * gridDim.x * kStripe; }
  __device__ echo_ffi::Move At(int64_t job) const {
    const int64_t stripe = job / kStripe, block = stripe / Turns(), turn = stripe % Turns();
    const int64_t moved = (turn * gridDim.x + block) * kStripe + job % kStripe;
    return moved < this->length ? Jobs::At(moved) : echo_ffi::Move{};
  }
};

template <typename Jobs, int kLoads, int kMerged, int kMergedLoads>
void Launch(const Jobs& jobs, int words, int64_t blocks, bool in_stripes, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(blocks);
  if (in_stripes) {
    using Stripes = InStripes<Jobs, kMerged>;
    echo_ffi::MoveRowsKernel<Stripes, uint4, kLoads, kMerged, kMergedLoads>
        <<<grid, echo_ffi::kBlockThreads, 0, stream>>>(Stripes{jobs}, words);
  } else {
    echo_ffi::MoveRowsKernel<Jobs, uint4, kLoads, kMerged, kMergedLoads>
        <<<grid, echo_ffi::kBlockThreads, 0, stream>>>(jobs, words);
  }
}

template <typename Jobs>
ffi::Error RunMoved(const Jobs& jobs, int64_t words, int64_t blocks, int64_t merged, bool in_stripes,
                    cudaStream_t stream) {
  const int count = static_cast<int>(words);
  if (words > 64) {
    if (merged == 1) Launch<Jobs, 3, 1, 3>(jobs, count, blocks, in_stripes, stream);
    if (merged == 2) Launch<Jobs, 3, 2, 5>(jobs, count, blocks, in_stripes, stream);
  } else {
    if (merged == 1) Launch<Jobs, 2, 1, 2>(jobs, count, blocks, in_stripes, stream);
    if (merged == 2) Launch<Jobs, 2, 2, 3>(jobs, count, blocks, in_stripes, stream);
    if (merged == 4) Launch<Jobs, 2, 4, 6>(jobs, count, blocks, in_stripes, stream);
  }
  return Launched();
}

ffi::Error RunMovedGather(cudaStream_t stream, ffi::AnyBuffer records, ffi::AnyBuffer pool, Numbers layer, Numbers rows,
                          Numbers slots, ffi::Result<ffi::AnyBuffer>, int64_t blocks, int64_t merged,
                          int64_t in_stripes) {
  const Sizes sizes = SizesOf(pool);
  const GatherJobs jobs{static_cast<const std::byte*>(pool.untyped_data()),
                        static_cast<std::byte*>(records.untyped_data()),
                        layer.typed_data(),
                        rows.typed_data(),
                        slots.typed_data(),
                        sizes.rows,
                        sizes.words * 16,
                        static_cast<int64_t>(rows.element_count())};
  return RunMoved(jobs, sizes.words, blocks, merged, in_stripes != 0, stream);
}

ffi::Error RunMovedScatter(cudaStream_t stream, ffi::AnyBuffer pool, ffi::AnyBuffer records, Numbers rows,
                           ffi::Result<ffi::AnyBuffer>, int64_t blocks, int64_t merged, int64_t in_stripes) {
  const Sizes sizes = SizesOf(pool);
  const int64_t entries = static_cast<int64_t>(rows.element_count());
  const ScatterJobs jobs{static_cast<std::byte*>(pool.untyped_data()),
                         static_cast<const std::byte*>(records.untyped_data()),
                         rows.typed_data(),
                         entries,
                         sizes.rows,
                         sizes.words * 16,
                         sizes.layers * entries};
  return RunMoved(jobs, sizes.words, blocks, merged, in_stripes != 0, stream);
}

// records, host_pool, layer, rows, slots -> records
auto BindGather() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Numbers>()
      .Arg<Numbers>()
      .Arg<Numbers>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("blocks");
}

// host_pool, records, rows -> host_pool
auto BindScatter() {
  return ffi::Ffi::Bind()
      .Ctx<Stream>()
      .Arg<ffi::AnyBuffer>()
      .Arg<ffi::AnyBuffer>()
      .Arg<Numbers>()
      .Ret<ffi::AnyBuffer>()
      .Attr<int64_t>("blocks");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PlainGatherCuda, RunPlainGather, BindGather(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(PlainScatterCuda, RunPlainScatter, BindScatter(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(MovedGatherCuda, RunMovedGather,
                              BindGather().Attr<int64_t>("merged").Attr<int64_t>("in_stripes"),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(MovedScatterCuda, RunMovedScatter,
                              BindScatter().Attr<int64_t>("merged").Attr<int64_t>("in_stripes"),
                              {ffi::Traits::kCmdBufferCompatible});
