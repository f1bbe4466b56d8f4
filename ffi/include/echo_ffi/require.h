// The operands of echo_require, seen and refused by their shapes alone, for every platform: a list as echo_allocate has it,
// said by positions, and what echo_recall moves, which must fit each other.
#ifndef ECHO_FFI_REQUIRE_H_
#define ECHO_FFI_REQUIRE_H_

#include <cstdint>
#include <utility>

#include "echo_ffi/rows.h"
#include "echo_ffi/slots.h"

namespace echo_ffi {

// `list->maps` is seen already. On return the lists of fills of both views are the same, in scratch.
inline ffi::Error ViewRequire(const char* target, Numbers table, Numbers new_rows, Numbers positions, Numbers touched,
                              Numbers staged, ffi::AnyBuffer records, ffi::AnyBuffer pool, Numbers layer,
                              ffi::AnyBuffer fresh, ffi::AnyBuffer staged_records,
                              ffi::Result<ffi::AnyBuffer> records_result, NumbersResult slots, CountResults counts,
                              NumbersResult scratch, AllocateViews* list, RecallViews* moves) {
  for (const auto& [name, numbers] : {std::pair{"table", table}, {"new_rows", new_rows}, {"positions", positions}}) {
    if (numbers.dimensions().size() == 2) continue;
    return Refuse(target, ": ", name, " has shape ", Describe(numbers.dimensions()), " but needs one list a seat");
  }
  const int64_t seats = table.dimensions()[0];
  ECHO_RETURN_IF_ERROR(SameLength(target, "table", seats, "new_rows", new_rows.dimensions()[0]));
  ECHO_RETURN_IF_ERROR(SameLength(target, "table", seats, "positions", positions.dimensions()[0]));
  const int64_t new_per_seat = new_rows.dimensions()[1], per_seat = new_per_seat + positions.dimensions()[1];
  const int64_t length = seats * per_seat;
  ECHO_RETURN_IF_ERROR(ViewList(target, length, touched, staged, counts, scratch, RequireScratch(length), per_seat,
                                new_per_seat, list));
  const int64_t selected = positions.element_count();
  ECHO_RETURN_IF_ERROR(SameLength(target, "positions", selected, "slots", slots->element_count()));
  if (table.dimensions()[1] >= INT32_MAX) return Refuse(target, ": table is ", table.dimensions()[1], " positions wide");
  list->table = table.typed_data();
  list->table_width = table.dimensions()[1];
  list->new_rows = new_rows.typed_data();
  list->positions = positions.typed_data();
  list->slots = slots->typed_data();
  int32_t* fills = list->scratch + AllocateScratch(length);
  for (int32_t** part : {&list->fill_rows, &list->fill_slots, &list->fill_mention, &list->fill_source}) {
    *part = fills;
    fills += length;
  }
  ECHO_RETURN_IF_ERROR(ViewMoved(target, records, pool, layer, fresh, staged_records, records_result, moves));
  ECHO_RETURN_IF_ERROR(SameLength(target, "host_of", list->maps.device_slots, "records", moves->records.count));
  ECHO_RETURN_IF_ERROR(SameLength(target, "slot_of", list->maps.host_rows, "axis 1 of host_pool", moves->pool.rows));
  ECHO_RETURN_IF_ERROR(SameLength(target, "new rows", list->count_of_new(), "new", moves->fresh.count));
  ECHO_RETURN_IF_ERROR(SameLength(target, "staged", list->staged_length, "staged records", moves->staged.count));
  moves->host_rows = list->fill_rows;
  moves->slots = list->fill_slots;
  moves->source = list->fill_source;
  moves->length = length;
  return ffi::Error::Success();
}

// What echo_require takes and gives, in order, as in slots.h.
template <typename Binding>
auto BindRequire(Binding&& binding) {
  auto taken = BindMapArguments(std::move(binding))
                   .template Arg<Numbers>()          // table
                   .template Arg<Numbers>()          // new_rows
                   .template Arg<Numbers>()          // positions
                   .template Arg<Numbers>()          // touched
                   .template Arg<Numbers>()          // staged
                   .template Arg<ffi::AnyBuffer>()   // records
                   .template Arg<ffi::AnyBuffer>()   // host_pool
                   .template Arg<Numbers>()          // layer
                   .template Arg<ffi::AnyBuffer>()   // new
                   .template Arg<ffi::AnyBuffer>();  // staged records
  auto given = BindMapResults(std::move(taken))
                   .template Ret<ffi::AnyBuffer>()  // records
                   .template Ret<Numbers>();        // slots
  return BindListResults(std::move(given));
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_REQUIRE_H_
