// The two halves of echo_require on a CPU, each a target of its own too. Buffers are seen already; numbers are not.
#ifndef ECHO_FFI_ON_CPU_H_
#define ECHO_FFI_ON_CPU_H_

#include <cstdint>

#include "echo_ffi/rows.h"
#include "echo_ffi/slots.h"

namespace echo_ffi {

// slots_cpu.cc. A refusal leaves the maps as they were.
ffi::Error AllocateOnCpu(const char* target, const AllocateViews& list);

// rows_cpu.cc. A refusal leaves the records as they were.
ffi::Error ReadLayer(const char* target, Numbers layer, int64_t layers, int64_t* value);
ffi::Error RecallOnCpu(const char* target, const RecallViews& views, int64_t layer, int64_t count);

}  // namespace echo_ffi

#endif  // ECHO_FFI_ON_CPU_H_
