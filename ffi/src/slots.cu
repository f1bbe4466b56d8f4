// echo_nominate, echo_allocate and echo_release on a GPU: one launch each, of the kernels in slots_kernel.cuh.
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
  AllocateInGrid<kBlocks>(task, static_cast<int>(blockIdx.x) / kBlocks);
}

template <int kBlocks>
__global__ void __launch_bounds__(kThreads, 1) NominateKernel(const __grid_constant__ NominateTask task) {
  NominateInCluster<kBlocks>(task);
}

__global__ void __launch_bounds__(256) ReleaseKernel(const ReleaseTask task) {
  ReleaseInGrid(task, static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                static_cast<int64_t>(gridDim.x) * blockDim.x);
}

struct Clusters {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  Clusters(int count, int blocks, int64_t shared_bytes, cudaStream_t stream) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(count * blocks));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  Clusters(const Clusters&) = delete;
};

template <typename Kernel>
cudaError_t Allow(Kernel kernel, int blocks, int64_t shared_bytes) {
  if (blocks > 8) {  // more than any GPU of the generation promises
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
}

// Whether this GPU can hold a cluster of so many blocks at once: parts of a GPU may be too small for 16.
template <int kBlocks>
bool CanHold(int64_t shared_bytes) {
  Clusters one(1, kBlocks, shared_bytes, nullptr);
  int clusters = 0;
  const bool can = Allow(AllocateKernel<kBlocks>, kBlocks, shared_bytes) == cudaSuccess &&
                   cudaOccupancyMaxActiveClusters(&clusters, AllocateKernel<kBlocks>, &one.config) == cudaSuccess &&
                   clusters > 0;
  cudaGetLastError();  // a refusal is an answer here, not an error of the next call
  return can;
}

int64_t SharedLimit() {
  int device = 0, limit = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return limit;
}

template <int kBlocks, typename Kernel, typename Task>
ffi::Error Launch(const char* target, Kernel kernel, Task task, int clusters, cudaStream_t stream) {
  const int64_t shared_bytes = SharedBytes<kBlocks>(task);
  if (Allow(kernel, kBlocks, shared_bytes) == cudaSuccess) {
    Clusters shape(clusters, kBlocks, shared_bytes, stream);
    cudaLaunchKernelEx(&shape.config, kernel, task);
  }
  return Launched(target);
}

ffi::Error TooManySlots(const char* target, int64_t slots, int64_t limit, int blocks) {
  return Refuse(target, ": the marks of ", slots, " slots need more than the ", limit, " bytes of shared memory of ",
                blocks, " blocks; choose slot_manager='jnp'");
}

template <int kBlocks>
ffi::Error LaunchAllocate(const char* target, AllocateTask task, int64_t limit, cudaStream_t stream) {
  if (!Divide<kBlocks>(&task, limit)) return TooManySlots(target, task.select.device_slots, limit, kBlocks);
  return Launch<kBlocks>(target, AllocateKernel<kBlocks>, task, task.clusters, stream);
}

template <int kBlocks>
ffi::Error LaunchNominate(const char* target, NominateTask task, int64_t limit, cudaStream_t stream) {
  if (!Divide<kBlocks>(&task, limit)) return TooManySlots(target, task.select.device_slots, limit, kBlocks);
  return Launch<kBlocks>(target, NominateKernel<kBlocks>, task, 1, stream);
}

ffi::Error Nominate(cudaStream_t stream, Numbers priority, ffi::Result<Numbers> nominees, ffi::Result<Numbers> marks) {
  constexpr const char* kTarget = "echo_nominate";
  ECHO_RETURN_IF_ERROR(ViewNominate(kTarget, priority, nominees, marks));
  NominateTask task{};
  task.select.priority = priority.typed_data();
  task.select.device_slots = static_cast<int32_t>(priority.element_count());
  task.nominees = nominees->typed_data();
  task.nominated = static_cast<int32_t>(nominees->element_count());
  task.marks = reinterpret_cast<uint32_t*>(marks->typed_data());
  // A branch of the graph beside the model's own kernels: a small pool shall not keep many SMs from those.
  constexpr int32_t kSmallPool = 32768;
  if (task.select.device_slots <= kSmallPool) return LaunchNominate<2>(kTarget, task, SharedLimit(), stream);
  return LaunchNominate<8>(kTarget, task, SharedLimit(), stream);
}

ffi::Error Allocate(cudaStream_t stream, Numbers slot_of, Numbers host_of, Numbers priority, Flags free, Numbers rows,
                    Numbers touched, Numbers staged, Numbers nominees, Numbers marks,
                    ffi::Result<Numbers> slot_of_result, ffi::Result<Numbers> host_of_result,
                    ffi::Result<Numbers> priority_result, ffi::Result<Flags> free_result,
                    ffi::Result<Numbers> marks_result, ffi::Result<Numbers> slots, ffi::Result<Numbers> fill_rows,
                    ffi::Result<Numbers> fill_slots, ffi::Result<Numbers> fill_mention,
                    ffi::Result<Numbers> fill_source, ffi::Result<Number> to_fill, ffi::Result<Number> hits,
                    ffi::Result<Number> useful, ffi::Result<Number> recalled, ffi::Result<Number> written,
                    ffi::Result<Number> evicted, ffi::Result<Numbers> scratch, int64_t per_seat, int64_t new_per_seat,
                    int64_t blocks) {
  constexpr const char* kTarget = "echo_allocate";
  AllocateViews list;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of, host_of, priority, free, slot_of_result, host_of_result,
                                priority_result, free_result, &list.maps));
  ECHO_RETURN_IF_ERROR(SameBuffer(kTarget, "marks", marks.untyped_data(), marks_result->untyped_data()));
  ECHO_RETURN_IF_ERROR(ViewAllocate(kTarget, rows, touched, staged, nominees, marks, slots, fill_rows, fill_slots,
                                    fill_mention, fill_source, {to_fill, hits, useful, recalled, written, evicted},
                                    scratch, per_seat, new_per_seat, &list));
  const int64_t limit = SharedLimit();
  const AllocateTask task = TaskOf(list);
  if (blocks == 0) blocks = CanHold<16>(limit) ? 16 : 8;
  if (blocks == 16) return LaunchAllocate<16>(kTarget, task, limit, stream);
  if (blocks == 8) return LaunchAllocate<8>(kTarget, task, limit, stream);
  return Refuse(kTarget, ": blocks is ", blocks, " but clusters of 8 or 16 blocks, or 0 for a choice, are needed");
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoNominateCuda, Nominate,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<Numbers>()   // priority
                                  .Ret<Numbers>()   // nominees
                                  .Ret<Numbers>(),  // marks
                              {ffi::Traits::kCmdBufferCompatible});

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
                                  .Arg<Numbers>()  // nominees
                                  .Arg<Numbers>()  // marks
                                  .Ret<Numbers>()  // slot_of
                                  .Ret<Numbers>()  // host_of
                                  .Ret<Numbers>()  // priority
                                  .Ret<Flags>()    // free
                                  .Ret<Numbers>()  // marks
                                  .Ret<Numbers>()  // slots
                                  .Ret<Numbers>()  // fill_rows
                                  .Ret<Numbers>()  // fill_slots
                                  .Ret<Numbers>()  // fill_mention
                                  .Ret<Numbers>()  // fill_source
                                  .Ret<Number>()   // to_fill
                                  .Ret<Number>()   // hits
                                  .Ret<Number>()   // useful
                                  .Ret<Number>()   // recalled
                                  .Ret<Number>()   // written
                                  .Ret<Number>()   // evicted
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
