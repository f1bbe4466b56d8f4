// What this library was built as, for Python to compare before it registers anything.
#include <cstdint>

#include "echo_ffi/targets.h"
#include "xla/ffi/api/c_api.h"

extern "C" {

int32_t EchoLibraryVersion() { return echo_ffi::kLibraryVersion; }
int32_t EchoXlaFfiApiMajor() { return XLA_FFI_API_MAJOR; }
int32_t EchoXlaFfiApiMinor() { return XLA_FFI_API_MINOR; }

// The GPU architectures of the CUDA handlers, as "90a" or "90a,100a"; empty where there are none.
const char* EchoCudaArchitectures() {
#ifdef ECHO_CUDA_ARCHITECTURES
  return ECHO_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}

}  // extern "C"
