// What this library was built as, for Python to compare before it registers anything.
#include <cstdint>

#include "echo_ffi/targets.h"
#include "xla/ffi/api/c_api.h"

extern "C" {

int32_t EchoLibraryVersion() { return echo_ffi::kLibraryVersion; }
int32_t EchoXlaFfiApiMajor() { return XLA_FFI_API_MAJOR; }
int32_t EchoXlaFfiApiMinor() { return XLA_FFI_API_MINOR; }

}  // extern "C"
