// echo_require on a CPU: echo_allocate, then echo_recall of what that lists.
#include <cstdint>

#include "echo_ffi/require.h"
#include "echo_ffi/targets.h"
#include "on_cpu.h"

namespace echo_ffi {
namespace {

ffi::Error Require(Numbers slot_of, Numbers host_of, Numbers priority, Flags free, Numbers rows, Numbers touched,
                   Numbers staged, ffi::AnyBuffer records, ffi::AnyBuffer pool, Numbers layer, ffi::AnyBuffer fresh,
                   ffi::AnyBuffer staged_records, ffi::Result<Numbers> slot_of_result,
                   ffi::Result<Numbers> host_of_result, ffi::Result<Numbers> priority_result,
                   ffi::Result<Flags> free_result, ffi::Result<ffi::AnyBuffer> records_result,
                   ffi::Result<Numbers> slots, ffi::Result<Number> to_fill, ffi::Result<Number> hits,
                   ffi::Result<Number> useful, ffi::Result<Number> recalled, ffi::Result<Number> written,
                   ffi::Result<Number> evicted, ffi::Result<Numbers> scratch, int64_t per_seat, int64_t new_per_seat) {
  constexpr const char* kTarget = "echo_require";
  AllocateViews list;
  RecallViews moves;
  int64_t of_layer = 0;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of, host_of, priority, free, slot_of_result, host_of_result,
                                priority_result, free_result, &list.maps));
  ECHO_RETURN_IF_ERROR(ViewRequire(kTarget, rows, touched, staged, records, pool, layer, fresh, staged_records,
                                   records_result, slots, {to_fill, hits, useful, recalled, written, evicted}, scratch,
                                   per_seat, new_per_seat, &list, &moves));
  ECHO_RETURN_IF_ERROR(ReadLayer(kTarget, layer, moves.pool.layers, &of_layer));
  ECHO_RETURN_IF_ERROR(AllocateOnCpu(kTarget, list));
  return RecallOnCpu(kTarget, moves, of_layer, *list.counts[kToFill]);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoRequireCpu, Require, BindRequire(ffi::Ffi::Bind()));

}  // namespace echo_ffi
