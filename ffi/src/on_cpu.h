// What the targets of a CPU share: the check of a list's numbers, and the two halves of echo_require, each a target of
// its own too. Buffers are seen already; numbers are not.
#ifndef ECHO_FFI_ON_CPU_H_
#define ECHO_FFI_ON_CPU_H_

#include <cstddef>
#include <cstdint>

#include "echo_ffi/rows.h"
#include "echo_ffi/slots.h"

namespace echo_ffi {

// Every entry of a list is negative (skip) or below `limit`, the rows that `of` holds.
inline ffi::Error CheckRange(const char* target, const char* name, ffi::Span<const int32_t> list, const char* of,
                             int64_t limit) {
  for (size_t m = 0; m < list.size(); ++m) {
    if (list[m] < limit) continue;
    return Refuse(target, ": ", name, "[", m, "] is ", list[m], " but ", of, " holds ", limit, " rows; a value below ",
                  limit, " or a negative one (skip) is needed");
  }
  return ffi::Error::Success();
}

// slots_cpu.cc. A refusal leaves the maps as they were.
ffi::Error AllocateOnCpu(const char* target, const AllocateViews& list);

// rows_cpu.cc. A refusal leaves the records as they were.
ffi::Error ReadLayer(const char* target, Numbers layer, int64_t layers, int64_t* value);
ffi::Error RecallOnCpu(const char* target, const RecallViews& views, int64_t layer, int64_t count);

}  // namespace echo_ffi

#endif  // ECHO_FFI_ON_CPU_H_
