// echo_locate: its operands, refused by their shapes alone, and the place of one list entry, for every platform.
//
// The place of an entry needs nothing of any other warp or block: a slot, a new record, or the entry's own place among the
// fetched records. So nothing here is exchanged between blocks, and places do not depend on who comes first.
#ifndef ECHO_FFI_LOCATE_H_
#define ECHO_FFI_LOCATE_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "echo_ffi/order.h"
#include "echo_ffi/records.h"
#include "echo_ffi/rows.h"
#include "echo_ffi/targets.h"

namespace echo_ffi {

inline constexpr const char* kLocate = "echo_locate";
inline constexpr int32_t kPageRows = 64;  // PAGE in echo_jax/types.py

// Operands as targets.h names them. Pointers are the platform's own; layer is read where the work is done.
struct LocateViews {
  const int32_t* slot_of = nullptr;
  const int32_t* layer = nullptr;
  const int32_t* page_table = nullptr;
  const int32_t* page_count = nullptr;
  const int32_t* lengths = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* staged_rows = nullptr;
  int32_t* places = nullptr;
  Records fresh, staged, fetched;  // [B T, record], [B S, record], [B T + B T K, record]
  Pool pool;
  int32_t seats = 0, tokens = 0, listed = 0;  // B, T, K
  int32_t pages = 0, staging = 0;             // of a seat
  int32_t device_slots = 0;

  ECHO_HOST_DEVICE int32_t lists() const { return seats * tokens; }
  ECHO_HOST_DEVICE bool HasLayer(int64_t number) const { return number >= 0 && number < pool.layers; }
};

// Where one entry of a list is, and what must be done for it.
struct Located {
  int32_t place = -1;
  int32_t row = -1;     // the host row of an entry that is the first of its row and has no slot
  bool is_fetched = false;
};

// The index of `position` in an ascending list that is padded with negative numbers, or -1.
ECHO_HOST_DEVICE inline int32_t Find(const int32_t* list, int32_t length, int32_t position) {
  int32_t low = 0, high = length;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    // Unsigned, so that the padding counts as higher than every position.
    if (static_cast<uint32_t>(list[middle]) < static_cast<uint32_t>(position)) low = middle + 1;
    else high = middle;
  }
  return low < length && list[low] == position ? low : -1;
}

// The first entry, among the lists before `list`, that names the row of `position` in page `page`; else `entry`. A page that
// several seats share has the same index in each of their tables, so the row has the same position in each of their lists.
ECHO_HOST_DEVICE inline int32_t FirstMention(const LocateViews& views, int32_t list, int32_t entry, int32_t position,
                                             int32_t page) {
  const int32_t seat = list / views.tokens, page_index = position / kPageRows;
  const int32_t first_seat = views.page_count[page] > 1 ? 0 : seat;
  for (int32_t other = first_seat; other <= seat; ++other) {
    if (other != seat && (views.page_table[static_cast<int64_t>(other) * views.pages + page_index] != page ||
                          position >= views.lengths[other])) {
      continue;
    }
    const int32_t end = other == seat ? list : (other + 1) * views.tokens;
    for (int32_t before = other * views.tokens; before < end; ++before) {
      const int32_t found = Find(views.positions + static_cast<int64_t>(before) * views.listed, views.listed, position);
      if (found >= 0) return before * views.listed + found;
    }
  }
  return entry;
}

// Entry `k` of list `list`, whose position is given, in the layer whose slots are `slot_of` (null: no such layer).
ECHO_HOST_DEVICE inline Located LocateEntry(const LocateViews& views, const int32_t* slot_of, int32_t list, int32_t k,
                                            int32_t position) {
  const int32_t seat = list / views.tokens, length = views.lengths[seat];
  if (position < 0) return {};
  if (position >= length) {
    const int32_t token = position - length;
    if (token >= views.tokens) return {};
    return {views.device_slots + seat * views.tokens + token, -1, false};
  }
  const int32_t page_index = position / kPageRows;
  if (page_index >= views.pages) return {};
  const int32_t page = views.page_table[static_cast<int64_t>(seat) * views.pages + page_index];
  if (page < 0 || page >= views.pool.rows / kPageRows) return {};
  const int32_t row = page * kPageRows + position % kPageRows;
  const int32_t slot = slot_of == nullptr ? -1 : slot_of[row];
  if (slot >= 0 && slot < views.device_slots) return {slot, -1, false};
  const int32_t entry = list * views.listed + k, first = FirstMention(views, list, entry, position, page);
  return {views.device_slots + views.lists() + first, row, first == entry};
}

inline ffi::Error ViewLocate(Numbers slot_of, Numbers layer, Numbers page_table, Numbers page_count, Numbers lengths,
                             Numbers positions, ffi::AnyBuffer fresh, Numbers staged_rows, ffi::AnyBuffer staged,
                             ffi::AnyBuffer pool, int64_t device_slots, ffi::Result<Numbers> places,
                             ffi::Result<ffi::AnyBuffer> fetched, LocateViews* views) {
  for (const auto& [name, numbers, rank] :
       {std::tuple{"slot_of", slot_of, 2u}, {"page_table", page_table, 2u}, {"page_count", page_count, 1u},
        {"lengths", lengths, 1u}, {"positions", positions, 3u}, {"staged_rows", staged_rows, 2u}}) {
    if (numbers.dimensions().size() == rank) continue;
    return Refuse(kLocate, ": ", name, " has shape ", Describe(numbers.dimensions()), " but needs ", rank, " axes");
  }
  ECHO_RETURN_IF_ERROR(IsScalar(kLocate, "layer", layer));
  ECHO_RETURN_IF_ERROR(ViewRecords(kLocate, "new", fresh, 2, &views->fresh));
  ECHO_RETURN_IF_ERROR(ViewRecords(kLocate, "staged", staged, 2, &views->staged));
  ECHO_RETURN_IF_ERROR(ViewRecords(kLocate, "fetched", *fetched, 1, &views->fetched));
  ECHO_RETURN_IF_ERROR(ViewPool(kLocate, pool, &views->pool));
  ECHO_RETURN_IF_ERROR(SameRecords(kLocate, "new", fresh, 2, "host_pool", pool, 2));
  ECHO_RETURN_IF_ERROR(SameRecords(kLocate, "staged", staged, 2, "host_pool", pool, 2));
  ECHO_RETURN_IF_ERROR(SameRecords(kLocate, "fetched", *fetched, 1, "host_pool", pool, 2));
  const auto shape = positions.dimensions();
  const int64_t seats = shape[0], tokens = shape[1], listed = shape[2], entries = seats * tokens * listed;
  ECHO_RETURN_IF_ERROR(SameLength(kLocate, "axis 0 of slot_of", slot_of.dimensions()[0], "axis 0 of host_pool",
                                  views->pool.layers));
  ECHO_RETURN_IF_ERROR(SameLength(kLocate, "axis 1 of slot_of", slot_of.dimensions()[1], "axis 1 of host_pool",
                                  views->pool.rows));
  ECHO_RETURN_IF_ERROR(SameLength(kLocate, "page_count", page_count.element_count(), "host_pool in pages",
                                  views->pool.rows / kPageRows));
  for (const auto& [name, length] :
       {std::pair{"page_table", page_table.dimensions()[0]}, {"lengths", lengths.dimensions()[0]},
        {"new", fresh.dimensions()[0]}, {"staged_rows", staged_rows.dimensions()[0]},
        {"staged", staged.dimensions()[0]}}) {
    ECHO_RETURN_IF_ERROR(SameLength(kLocate, name, length, "positions", seats));
  }
  ECHO_RETURN_IF_ERROR(SameLength(kLocate, "axis 1 of new", fresh.dimensions()[1], "axis 1 of positions", tokens));
  ECHO_RETURN_IF_ERROR(SameLength(kLocate, "axis 1 of staged_rows", staged_rows.dimensions()[1], "axis 1 of staged",
                                  staged.dimensions()[1]));
  ECHO_RETURN_IF_ERROR(SameLength(kLocate, "places", places->element_count(), "positions", entries));
  ECHO_RETURN_IF_ERROR(SameLength(kLocate, "fetched", views->fetched.count, "new records and list entries",
                                  seats * tokens + entries));
  if (device_slots < 0 || device_slots + seats * tokens + entries > INT32_MAX) {
    return Refuse(kLocate, ": device_slots is ", device_slots, " but slots, new records and ", entries,
                  " list entries must be numbered from 0 to ", INT32_MAX, "; lower the batch or the slots");
  }
  views->slot_of = slot_of.typed_data();
  views->layer = layer.typed_data();
  views->page_table = page_table.typed_data();
  views->page_count = page_count.typed_data();
  views->lengths = lengths.typed_data();
  views->positions = positions.typed_data();
  views->staged_rows = staged_rows.typed_data();
  views->places = places->typed_data();
  views->seats = static_cast<int32_t>(seats);
  views->tokens = static_cast<int32_t>(tokens);
  views->listed = static_cast<int32_t>(listed);
  views->pages = static_cast<int32_t>(page_table.dimensions()[1]);
  views->staging = static_cast<int32_t>(staged_rows.dimensions()[1]);
  views->device_slots = static_cast<int32_t>(device_slots);
  return ffi::Error::Success();
}

// What echo_locate takes and gives, in order.
template <typename Binding>
auto BindLocate(Binding&& binding) {
  return std::move(binding)
      .template Arg<Numbers>()         // slot_of
      .template Arg<Numbers>()         // layer
      .template Arg<Numbers>()         // page_table
      .template Arg<Numbers>()         // page_count
      .template Arg<Numbers>()         // lengths
      .template Arg<Numbers>()         // positions
      .template Arg<ffi::AnyBuffer>()  // new
      .template Arg<Numbers>()         // staged_rows
      .template Arg<ffi::AnyBuffer>()  // staged
      .template Arg<ffi::AnyBuffer>()  // host_pool
      .template Attr<int64_t>("device_slots")
      .template Ret<Numbers>()          // places
      .template Ret<ffi::AnyBuffer>();  // fetched
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_LOCATE_H_
