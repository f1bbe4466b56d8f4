// echo_require on a CPU: the rows of the positions, echo_allocate, then echo_recall of what that lists.
#include <algorithm>
#include <cstdint>

#include "echo_ffi/require.h"
#include "echo_ffi/targets.h"
#include "on_cpu.h"

namespace echo_ffi {
namespace {

// The list of all seats, rows i32[length], from what the positions say.
ffi::Error ListRows(const char* target, const AllocateViews& list, int32_t* rows) {
  const int64_t selected = list.per_seat - list.new_per_seat;
  for (int64_t seat = 0; seat < list.length / list.per_seat; ++seat) {
    rows = std::copy_n(list.new_rows + seat * list.new_per_seat, list.new_per_seat, rows);
    for (int64_t i = seat * selected; i < (seat + 1) * selected; ++i) {
      const int32_t position = list.positions[i];
      if (position >= list.table_width) {
        return Refuse(target, ": positions[", i, "] is ", position, " but table holds ", list.table_width,
                      " positions; a value below that or a negative one (skip) is needed");
      }
      *rows++ = position < 0 ? kNoRow : list.table[seat * list.table_width + position];
    }
  }
  return ffi::Error::Success();
}

ffi::Error Require(Numbers slot_of, Numbers host_of, Numbers priority, Flags free, Numbers table, Numbers new_rows,
                   Numbers positions, Numbers touched, Numbers staged, ffi::AnyBuffer records, ffi::AnyBuffer pool,
                   Numbers layer, ffi::AnyBuffer fresh, ffi::AnyBuffer staged_records,
                   ffi::Result<Numbers> slot_of_result, ffi::Result<Numbers> host_of_result,
                   ffi::Result<Numbers> priority_result, ffi::Result<Flags> free_result,
                   ffi::Result<ffi::AnyBuffer> records_result, ffi::Result<Numbers> slots, ffi::Result<Number> to_fill,
                   ffi::Result<Number> hits, ffi::Result<Number> useful, ffi::Result<Number> recalled,
                   ffi::Result<Number> written, ffi::Result<Number> evicted, ffi::Result<Numbers> scratch) {
  constexpr const char* kTarget = "echo_require";
  AllocateViews list;
  RecallViews moves;
  int64_t of_layer = 0;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of, host_of, priority, free, slot_of_result, host_of_result,
                                priority_result, free_result, &list.maps));
  ECHO_RETURN_IF_ERROR(ViewRequire(kTarget, table, new_rows, positions, touched, staged, records, pool, layer, fresh,
                                   staged_records, records_result, slots,
                                   {to_fill, hits, useful, recalled, written, evicted}, scratch, &list, &moves));
  ECHO_RETURN_IF_ERROR(ReadLayer(kTarget, layer, moves.pool.layers, &of_layer));
  int32_t *rows = list.scratch, *slots_of_list = list.scratch + list.length, *slots_of_positions = list.slots;
  ECHO_RETURN_IF_ERROR(ListRows(kTarget, list, rows));
  list.rows = rows;
  list.slots = slots_of_list;
  ECHO_RETURN_IF_ERROR(AllocateOnCpu(kTarget, list));
  for (int64_t seat = 0; seat < list.length / list.per_seat; ++seat) {
    slots_of_positions = std::copy(slots_of_list + seat * list.per_seat + list.new_per_seat,
                                   slots_of_list + (seat + 1) * list.per_seat, slots_of_positions);
  }
  return RecallOnCpu(kTarget, moves, of_layer, *list.counts[kToFill]);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoRequireCpu, Require, BindRequire(ffi::Ffi::Bind()));

}  // namespace echo_ffi
