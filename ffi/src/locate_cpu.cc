// echo_locate on a CPU: one thread, entry after entry. Numbers are checked before a byte moves.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <unordered_map>

#include "echo_ffi/locate.h"
#include "on_cpu.h"

namespace echo_ffi {
namespace {

ffi::Error CheckLists(const LocateViews& views) {
  const ffi::Span<const int32_t> table(views.page_table, static_cast<size_t>(views.seats) * views.pages);
  ECHO_RETURN_IF_ERROR(CheckRange(kLocate, "page_table", table, "host_pool in pages", views.pool.rows / kPageRows));
  for (int64_t entry = 0; entry < static_cast<int64_t>(views.lists()) * views.listed; ++entry) {
    const int64_t limit = static_cast<int64_t>(views.pages) * kPageRows;
    if (views.positions[entry] < limit) continue;
    return Refuse(kLocate, ": positions[", entry, "] is ", views.positions[entry], " but a seat's page table holds ",
                  limit, " positions; a value below that or a negative one (padding) is needed");
  }
  return ffi::Error::Success();
}

ffi::Error Locate(Numbers slot_of, Numbers layer_number, Numbers page_table, Numbers page_count, Numbers lengths,
                  Numbers positions, ffi::AnyBuffer fresh, Numbers staged_rows, ffi::AnyBuffer staged,
                  ffi::AnyBuffer pool, int64_t device_slots, ffi::Result<Numbers> places,
                  ffi::Result<ffi::AnyBuffer> fetched) {
  LocateViews views;
  int64_t layer = 0;
  ECHO_RETURN_IF_ERROR(ViewLocate(slot_of, layer_number, page_table, page_count, lengths, positions, fresh, staged_rows,
                                  staged, pool, device_slots, places, fetched, &views));
  ECHO_RETURN_IF_ERROR(ReadLayer(kLocate, layer_number, views.pool.layers, &layer));
  ECHO_RETURN_IF_ERROR(CheckLists(views));
  const size_t bytes = static_cast<size_t>(views.pool.records.record_bytes);
  const int32_t* slots = views.slot_of + layer * views.pool.rows;
  std::memcpy(views.fetched.data, views.fresh.data, bytes * static_cast<size_t>(views.lists()));
  for (int32_t seat = 0; seat < views.seats; ++seat) {
    const int64_t first_staged = static_cast<int64_t>(seat) * views.staging;
    std::unordered_map<int32_t, int64_t> place_of;  // the first one, where a row is staged twice
    for (int64_t at = first_staged; at < first_staged + views.staging; ++at) {
      if (views.staged_rows[at] >= 0) place_of.emplace(views.staged_rows[at], at);
    }
    for (int32_t list = seat * views.tokens; list < (seat + 1) * views.tokens; ++list) {
      for (int32_t k = 0; k < views.listed; ++k) {
        const int64_t entry = static_cast<int64_t>(list) * views.listed + k;
        const Located located = LocateEntry(views, slots, list, k, views.positions[entry]);
        views.places[entry] = located.place;
        if (!located.is_fetched) continue;
        const auto staged_at = place_of.find(located.row);
        const std::byte* from =
            staged_at == place_of.end() ? views.pool.at(layer, located.row) : views.staged.at(staged_at->second);
        std::memcpy(views.fetched.at(views.lists() + entry), from, bytes);
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoLocateCpu, Locate, BindLocate(ffi::Ffi::Bind()));

}  // namespace echo_ffi
