// echo_allocate, echo_require and echo_release on a GPU: one kernel each, of those in slots_kernel.cuh, and for long lists a
// look before it.
//
// Rows and staged rows outside the maps are skipped as padding is. Where the list has more rows than the pool has slots,
// the last of them get none: NO_SLOT in every list.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "echo_ffi/launch.cuh"
#include "echo_ffi/require.h"
#include "echo_ffi/slots.h"
#include "slots_kernel.cuh"

namespace echo_ffi {
namespace {

__global__ void __launch_bounds__(kChunk) LookKernel(const __grid_constant__ AllocateTask task) {
  __shared__ LookShared shared;
  LookAtChunks(task, shared, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) AllocateKernel(const __grid_constant__ AllocateTask task) {
  AllocateInCluster<kBlocks>(task);
}

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) RequireKernel(const __grid_constant__ RequireTask task) {
  RequireInCluster<kBlocks>(task);
}

__global__ void __launch_bounds__(256) ReleaseKernel(const ReleaseTask task) {
  ReleaseInGrid(task, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                static_cast<int64_t>(gridDim.x) * blockDim.x);
}

struct OneCluster {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  OneCluster(int blocks, int64_t shared_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  OneCluster(const OneCluster&) = delete;
};

template <typename Kernel>
cudaError_t Allow(Kernel kernel, int blocks, int64_t limit) {
  if (blocks > 8) {  // more than any GPU of the generation promises
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limit));
}

// Whether this GPU can hold a cluster of 16 blocks at once: parts of a GPU may be too small for it.
bool CanHold16(int64_t limit) {
  const auto kernel = RequireKernel<16>;
  OneCluster one(16, limit, nullptr);
  int clusters = 0;
  const bool can = Allow(kernel, 16, limit) == cudaSuccess &&
                   cudaOccupancyMaxActiveClusters(&clusters, kernel, &one.config) == cudaSuccess && clusters > 0;
  cudaGetLastError();  // a refusal is an answer here, not an error of the next call
  return can;
}

int64_t SharedLimit() {
  int device = 0, limit = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return limit;
}

// `allocate` is `task`, or the part of it that is cut among blocks.
template <int kBlocks, typename Kernel, typename Task>
ffi::Error Launch(const char* target, Kernel kernel, Task& task, AllocateTask& allocate, int64_t limit,
                  cudaStream_t stream) {
  if (!Divide<kBlocks>(&allocate, limit)) {
    return Refuse(target, ": the marks of ", allocate.device_slots, " slots need more than the ", limit,
                  " bytes of shared memory of ", kBlocks, " blocks; choose slot_manager='jnp'");
  }
  const int64_t shared_bytes = SharedBytes<kBlocks>(allocate);
  // Up to the limit whatever this call needs: what is allowed belongs to the kernel, and another thread may launch it too.
  if (Allow(kernel, kBlocks, limit) == cudaSuccess) {
    constexpr int kMostLookBlocks = 2048;  // more chunks than that: several for a block
    const int looks = std::clamp((allocate.length + kChunk - 1) / kChunk, 1, kMostLookBlocks);
    if (allocate.is_look_apart) LookKernel<<<static_cast<unsigned>(looks), kChunk, 0, stream>>>(allocate);
    OneCluster shape(kBlocks, shared_bytes, stream);
    cudaLaunchKernelEx(&shape.config, kernel, task);
  }
  return Launched(target);
}

ffi::Error Allocate(cudaStream_t stream, Numbers slot_of, Numbers host_of, Numbers priority, Flags free, Numbers rows,
                    Numbers touched, Numbers staged, ffi::Result<Numbers> slot_of_result,
                    ffi::Result<Numbers> host_of_result, ffi::Result<Numbers> priority_result,
                    ffi::Result<Flags> free_result, ffi::Result<Numbers> slots, ffi::Result<Numbers> fill_rows,
                    ffi::Result<Numbers> fill_slots, ffi::Result<Numbers> fill_mention,
                    ffi::Result<Numbers> fill_source, ffi::Result<Number> to_fill, ffi::Result<Number> hits,
                    ffi::Result<Number> useful, ffi::Result<Number> recalled, ffi::Result<Number> written,
                    ffi::Result<Number> evicted, ffi::Result<Numbers> scratch, int64_t per_seat, int64_t new_per_seat,
                    int64_t blocks) {
  constexpr const char* kTarget = "echo_allocate";
  AllocateViews list;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of, host_of, priority, free, slot_of_result, host_of_result,
                                priority_result, free_result, &list.maps));
  ECHO_RETURN_IF_ERROR(ViewAllocate(kTarget, rows, touched, staged, slots, fill_rows, fill_slots, fill_mention,
                                    fill_source, {to_fill, hits, useful, recalled, written, evicted},
                                    scratch, per_seat, new_per_seat, &list));
  const int64_t limit = SharedLimit();
  AllocateTask task = TaskOf(list, true);
  if (blocks == 0) blocks = CanHold16(limit) ? 16 : 8;
  if (blocks == 16) return Launch<16>(kTarget, AllocateKernel<16>, task, task, limit, stream);
  if (blocks == 8) return Launch<8>(kTarget, AllocateKernel<8>, task, task, limit, stream);
  return Refuse(kTarget, ": blocks is ", blocks, " but a cluster of 8 or 16 blocks, or 0 for a choice, is needed");
}

DeviceRecords OnDevice(const Records& records) { return {records.data, records.count, records.record_bytes}; }

ffi::Error Require(cudaStream_t stream, Numbers slot_of, Numbers host_of, Numbers priority, Flags free, Numbers table,
                   Numbers new_rows, Numbers positions, Numbers touched, Numbers staged, ffi::AnyBuffer records,
                   ffi::AnyBuffer pool, Numbers layer, ffi::AnyBuffer fresh, ffi::AnyBuffer staged_records,
                   ffi::Result<Numbers> slot_of_result, ffi::Result<Numbers> host_of_result,
                   ffi::Result<Numbers> priority_result, ffi::Result<Flags> free_result,
                   ffi::Result<ffi::AnyBuffer> records_result, ffi::Result<Numbers> slots, ffi::Result<Number> to_fill,
                   ffi::Result<Number> hits, ffi::Result<Number> useful, ffi::Result<Number> recalled,
                   ffi::Result<Number> written, ffi::Result<Number> evicted, ffi::Result<Numbers> scratch) {
  constexpr const char* kTarget = "echo_require";
  AllocateViews list;
  RecallViews moves;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of, host_of, priority, free, slot_of_result, host_of_result,
                                priority_result, free_result, &list.maps));
  ECHO_RETURN_IF_ERROR(ViewRequire(kTarget, table, new_rows, positions, touched, staged, records, pool, layer, fresh,
                                   staged_records, records_result, slots,
                                   {to_fill, hits, useful, recalled, written, evicted}, scratch, &list, &moves));
  uintptr_t addresses = 0;
  for (const std::byte* data : {moves.records.data, moves.fresh.data, moves.staged.data, moves.pool.records.data}) {
    addresses |= reinterpret_cast<uintptr_t>(data);
  }
  const DevicePool whole{moves.pool.records.data, moves.pool.layers, moves.pool.rows, moves.pool.records.record_bytes};
  const RecallJobs recall{OnDevice(moves.records), OnDevice(moves.fresh), OnDevice(moves.staged), whole,
                          layer.typed_data(),      nullptr,               moves.host_rows,        moves.slots,
                          moves.source,            moves.length};
  RequireTask task{TaskOf(list, false), recall, addresses % 16 == 0};
  const int64_t limit = SharedLimit();
  if (CanHold16(limit)) return Launch<16>(kTarget, RequireKernel<16>, task, task.allocate, limit, stream);
  return Launch<8>(kTarget, RequireKernel<8>, task, task.allocate, limit, stream);
}

ffi::Error Release(cudaStream_t stream, Numbers slot_of, Numbers host_of, Numbers priority, Flags free,
                   Flags is_dropped, ffi::Result<Numbers> slot_of_result, ffi::Result<Numbers> host_of_result,
                   ffi::Result<Numbers> priority_result, ffi::Result<Flags> free_result) {
  constexpr const char* kTarget = "echo_release";
  Maps maps;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of, host_of, priority, free, slot_of_result, host_of_result,
                                priority_result, free_result, &maps));
  ECHO_RETURN_IF_ERROR(SameLength(kTarget, "slot_of", maps.host_rows, "is_dropped", is_dropped.element_count()));
  const ReleaseTask task{maps.slot_of,
                         maps.host_of,
                         maps.priority,
                         maps.free,
                         is_dropped.typed_data(),
                         static_cast<int32_t>(maps.host_rows),
                         static_cast<int32_t>(maps.device_slots)};
  const int64_t blocks = (std::max(maps.host_rows, maps.device_slots) + 255) / 256;
  if (blocks == 0) return ffi::Error::Success();
  ReleaseKernel<<<static_cast<unsigned>(std::min<int64_t>(blocks, 2048)), 256, 0, stream>>>(task);
  return Launched(kTarget);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoAllocateCuda, Allocate, BindAllocate(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoRequireCuda, Require, BindRequire(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoReleaseCuda, Release, BindRelease(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace echo_ffi
