// CUDA events around a call, for bench/events.py: compiled and registered there on the spot. Bench only.
//
// An event is recorded where its target stands in the program's order. The target passes its operand on, so that what is
// timed can be made to wait for the first event and the second event for what is timed. Not command-buffer compatible:
// a captured event would time nothing.
#include <cuda_runtime.h>

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
constexpr int64_t kEvents = 1024;
cudaEvent_t events[kEvents] = {};

ffi::Error Record(cudaStream_t stream, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, int64_t number) {
  if (number < 0 || number >= kEvents) return ffi::Error::InvalidArgument("the number of an event is below 1024");
  cudaError_t error = events[number] == nullptr ? cudaEventCreate(&events[number]) : cudaSuccess;
  if (error == cudaSuccess) error = cudaEventRecord(events[number], stream);
  return error == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(error));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(RecordEventCuda, Record,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("number"));

// Milliseconds from one event to another; negative where one of them was never recorded.
extern "C" float BenchElapsed(int64_t from, int64_t to) {
  float milliseconds = 0;
  const bool is_known = 0 <= from && from < kEvents && 0 <= to && to < kEvents && events[from] && events[to];
  if (!is_known || cudaEventElapsedTime(&milliseconds, events[from], events[to]) != cudaSuccess) return -1;
  return milliseconds;
}
