// What every CUDA handler needs around its kernels: an error that names the target, and the other GPU recognised. Knows
// the CUDA runtime and what the library was built for; knows no kernel.
//
// Handlers are captured into XLA's command buffers, so between the border checks and the launch there is no allocation,
// no synchronisation and no query of a stream.
#ifndef ECHO_FFI_LAUNCH_CUH_
#define ECHO_FFI_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "echo_ffi/records.h"

#ifndef ECHO_CUDA_ARCHITECTURES
#error "CMakeLists.txt defines ECHO_CUDA_ARCHITECTURES, the architectures this library is compiled for"
#endif

namespace echo_ffi {

using Stream = ffi::PlatformStream<cudaStream_t>;

// To be returned right after a launch. A GPU that the library holds no code for never runs a kernel of it: the launch
// itself fails, and here that failure gets its reason and its remedy.
inline ffi::Error Launched(const char* target) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return ffi::Error::Success();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    std::ostringstream text;
    text << target << ": the library was built for sm_" << ECHO_CUDA_ARCHITECTURES << " but this GPU is sm_" << major
         << minor << "; build it again with -C cmake.define.ECHO_CUDA_ARCHITECTURES=" << major << minor
         << ", or choose host_memory='jnp'";
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition, text.str());
  }
  return ffi::Error::Internal(std::string(target) + ": the kernel was not launched: " + cudaGetErrorString(error));
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_LAUNCH_CUH_
