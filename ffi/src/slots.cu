// echo_allocate and echo_release on a GPU: one launch each, of the kernels in slots_kernel.cuh.
//
// Rows and staged rows outside the maps are skipped as padding is. Where the list has more rows than the pool has slots,
// the last of them get none: NO_SLOT in every list.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "echo_ffi/launch.cuh"
#include "echo_ffi/slots.h"
#include "slots_kernel.cuh"

namespace echo_ffi {
namespace {

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) AllocateKernel(const __grid_constant__ AllocateTask task) {
  AllocateInCluster<kBlocks>(task);
}

__global__ void __launch_bounds__(256) ReleaseKernel(const ReleaseTask task) {
  ReleaseInGrid(task, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                static_cast<int64_t>(gridDim.x) * blockDim.x);
}

struct Cluster {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  Cluster(int blocks, int64_t shared_bytes, cudaStream_t stream) {
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
  Cluster(const Cluster&) = delete;
};

template <int kBlocks>
cudaError_t Allow(int64_t shared_bytes) {
  const auto kernel = AllocateKernel<kBlocks>;
  if (kBlocks > 8) {  // more than any GPU of the generation promises
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
}

// Whether this GPU can hold a cluster of so many blocks at once: parts of a GPU may be too small for 16.
template <int kBlocks>
bool CanHold(int64_t shared_bytes) {
  Cluster cluster(kBlocks, shared_bytes, nullptr);
  int clusters = 0;
  const bool can = Allow<kBlocks>(shared_bytes) == cudaSuccess &&
                   cudaOccupancyMaxActiveClusters(&clusters, AllocateKernel<kBlocks>, &cluster.config) == cudaSuccess &&
                   clusters > 0;
  cudaGetLastError();  // a refusal is an answer here, not an error of the next call
  return can;
}

template <int kBlocks>
ffi::Error Launch(const char* target, AllocateTask task, int64_t limit, cudaStream_t stream) {
  if (!Divide<kBlocks>(&task, limit)) {
    return Refuse(target, ": the marks of ", task.device_slots, " slots need more than the ", limit,
                  " bytes of shared memory of ", kBlocks, " blocks; choose slot_manager='jnp'");
  }
  const int64_t shared_bytes = SharedBytes<kBlocks>(task);
  if (Allow<kBlocks>(shared_bytes) == cudaSuccess) {
    Cluster cluster(kBlocks, shared_bytes, stream);
    cudaLaunchKernelEx(&cluster.config, AllocateKernel<kBlocks>, task);
  }
  return Launched(target);
}

ffi::Error Allocate(cudaStream_t stream, Numbers slot_of, Numbers host_of, Numbers priority, Flags free, Numbers rows,
                    Numbers touched, Numbers staged, ffi::Result<Numbers> slot_of_result,
                    ffi::Result<Numbers> host_of_result, ffi::Result<Numbers> priority_result,
                    ffi::Result<Flags> free_result, ffi::Result<Numbers> slots, ffi::Result<Numbers> fill_rows,
                    ffi::Result<Numbers> fill_slots, ffi::Result<Numbers> fill_mention,
                    ffi::Result<Numbers> fill_source, ffi::Result<Numbers> counts, ffi::Result<Numbers> scratch,
                    int64_t per_seat, int64_t new_per_seat, int64_t blocks) {
  constexpr const char* kTarget = "echo_allocate";
  AllocateViews list;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of, host_of, priority, free, slot_of_result, host_of_result,
                                priority_result, free_result, &list.maps));
  ECHO_RETURN_IF_ERROR(ViewAllocate(kTarget, rows, touched, staged, slots, fill_rows, fill_slots, fill_mention,
                                    fill_source, counts, scratch, per_seat, new_per_seat, &list));
  int device = 0, limit = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const AllocateTask task = TaskOf(list);
  if (blocks == 0) blocks = CanHold<16>(limit) ? 16 : 8;
  if (blocks == 16) return Launch<16>(kTarget, task, limit, stream);
  if (blocks == 8) return Launch<8>(kTarget, task, limit, stream);
  return Refuse(kTarget, ": blocks is ", blocks, " but a cluster of 8 or 16 blocks, or 0 for a choice, is needed");
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoAllocateCuda, Allocate,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Numbers>()  // slot_of
                                  .Arg<Numbers>()  // host_of
                                  .Arg<Numbers>()  // priority
                                  .Arg<Flags>()    // free
                                  .Arg<Numbers>()  // rows
                                  .Arg<Numbers>()  // touched
                                  .Arg<Numbers>()  // staged
                                  .Ret<Numbers>()  // slot_of
                                  .Ret<Numbers>()  // host_of
                                  .Ret<Numbers>()  // priority
                                  .Ret<Flags>()    // free
                                  .Ret<Numbers>()  // slots
                                  .Ret<Numbers>()  // fill_rows
                                  .Ret<Numbers>()  // fill_slots
                                  .Ret<Numbers>()  // fill_mention
                                  .Ret<Numbers>()  // fill_source
                                  .Ret<Numbers>()  // counts
                                  .Ret<Numbers>()  // scratch
                                  .Attr<int64_t>("per_seat")
                                  .Attr<int64_t>("new_per_seat")
                                  .Attr<int64_t>("blocks"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoReleaseCuda, Release,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Numbers>()  // slot_of
                                  .Arg<Numbers>()  // host_of
                                  .Arg<Numbers>()  // priority
                                  .Arg<Flags>()    // free
                                  .Arg<Flags>()    // is_dropped
                                  .Ret<Numbers>()  // slot_of
                                  .Ret<Numbers>()  // host_of
                                  .Ret<Numbers>()  // priority
                                  .Ret<Flags>(),   // free
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace echo_ffi
