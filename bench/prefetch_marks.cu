// Marks in a program, and a sweep of the L2, for bench/prefetch_timing.py: compiled and registered there on the spot.
// Bench only.
//
// A mark passes its first operands on, in place, as many as there are results; the others it only waits for. With a
// number it records that CUDA event where it stands in the program's order, without one it launches nothing: an order
// between two kernels that costs the GPU nothing. Not command-buffer compatible: a captured event would time nothing.
//
// The sweep waits for its operands and writes zeros to its result, which is larger than the L2.
#include <cuda_runtime.h>

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
constexpr int64_t kEvents = 64;
cudaEvent_t events[kEvents] = {};

ffi::Error Mark(cudaStream_t stream, ffi::RemainingArgs, ffi::RemainingRets, int64_t number) {
  if (number < 0) return ffi::Error::Success();
  if (number >= kEvents) return ffi::Error::InvalidArgument("the number of an event is below 64");
  cudaError_t error = events[number] == nullptr ? cudaEventCreate(&events[number]) : cudaSuccess;
  if (error == cudaSuccess) error = cudaEventRecord(events[number], stream);
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

ffi::Error Sweep(cudaStream_t stream, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  const cudaError_t error = cudaMemsetAsync(result->untyped_data(), 0, result->size_bytes(), stream);
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SweepCuda, Sweep,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(MarkCuda, Mark,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("number"));

// Milliseconds from one event to another; negative where one of them was never recorded.
extern "C" float MarkElapsed(int64_t from, int64_t to) {
  float milliseconds = 0;
  const bool is_known = 0 <= from && from < kEvents && 0 <= to && to < kEvents && events[from] && events[to];
  if (!is_known || cudaEventElapsedTime(&milliseconds, events[from], events[to]) != cudaSuccess) return -1;
  return milliseconds;
}
