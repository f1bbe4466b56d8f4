// The operands of echo_allocate, echo_require and echo_release, seen and refused by their shapes alone, for every platform, and the
// numbers both platforms share. Nothing here reads the contents of a buffer.
#ifndef ECHO_FFI_SLOTS_H_
#define ECHO_FFI_SLOTS_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "echo_ffi/records.h"

namespace echo_ffi {

using Numbers = ffi::Buffer<ffi::S32>;
using Number = ffi::BufferR0<ffi::S32>;
using Flags = ffi::Buffer<ffi::PRED>;

// FREE_PRIORITY, PROTECTED, NO_SLOT, NO_ROW and NO_PLACE of echo_jax/pool.py and types.py.
inline constexpr int32_t kFreePriority = INT32_MIN;
inline constexpr int32_t kProtected = INT32_MAX;
inline constexpr int32_t kNoSlot = -1;
inline constexpr int32_t kNoRow = -1;

// What is counted, in the order of the results. A result each: where XLA has to cut them out of one list, it launches a
// copy for each, and what comes next waits.
enum Count : int { kToFill, kHits, kUseful, kRecalled, kWritten, kEvicted, kCounts };

// Words of scratch of echo_allocate and of echo_require, which lists its fills behind the former; _ffi.py holds the same
// numbers.
constexpr int64_t AllocateScratch(int64_t length) { return 12 * length + 20; }
constexpr int64_t RequireScratch(int64_t length) { return AllocateScratch(length) + 4 * length; }

struct Maps {
  int32_t* slot_of = nullptr;   // [host_rows]
  int32_t* host_of = nullptr;   // [device_slots]
  int32_t* priority = nullptr;  // [device_slots]
  bool* free = nullptr;         // [device_slots]
  int64_t host_rows = 0;
  int64_t device_slots = 0;
};

struct AllocateViews {
  Maps maps;
  const int32_t* rows = nullptr;     // [length], or null: then what the four below say
  const int32_t* new_rows = nullptr;   // [seats, new_per_seat]
  const int32_t* table = nullptr;      // [seats, table_width]  host row of every position
  const int32_t* positions = nullptr;  // [seats, per_seat - new_per_seat]
  int64_t table_width = 0;
  const int32_t* touched = nullptr;  // [length], or [1] for all  the priority each entry gives its slot
  const int32_t* staged = nullptr;   // [staged_length]
  int64_t length = 0;
  int64_t staged_length = 0;
  bool is_touched_alike = false;  // one priority for all
  int64_t per_seat = 0;
  int64_t new_per_seat = 0;
  int32_t* slots = nullptr;         // [length]; without rows as positions
  int32_t* fill_rows = nullptr;     // [length], as the three below
  int32_t* fill_slots = nullptr;
  int32_t* fill_mention = nullptr;
  int32_t* fill_source = nullptr;
  int32_t* counts[kCounts] = {};  // one number each
  int32_t* scratch = nullptr;  // [AllocateScratch(length)]

  int64_t count_of_new() const { return length / per_seat * new_per_seat; }
  bool IsNew(int64_t mention) const { return mention % per_seat < new_per_seat; }
  int32_t Touched(int64_t mention) const { return touched[is_touched_alike ? 0 : mention]; }
  int32_t NewPlace(int64_t mention) const {
    return static_cast<int32_t>(mention / per_seat * new_per_seat + mention % per_seat);
  }
};

inline ffi::Error ViewMaps(const char* target, Numbers slot_of, Numbers host_of, Numbers priority, Flags free,
                           ffi::Result<Numbers> slot_of_result, ffi::Result<Numbers> host_of_result,
                           ffi::Result<Numbers> priority_result, ffi::Result<Flags> free_result, Maps* maps) {
  ECHO_RETURN_IF_ERROR(SameBuffer(target, "slot_of", slot_of.untyped_data(), slot_of_result->untyped_data()));
  ECHO_RETURN_IF_ERROR(SameBuffer(target, "host_of", host_of.untyped_data(), host_of_result->untyped_data()));
  ECHO_RETURN_IF_ERROR(SameBuffer(target, "priority", priority.untyped_data(), priority_result->untyped_data()));
  ECHO_RETURN_IF_ERROR(SameBuffer(target, "free", free.untyped_data(), free_result->untyped_data()));
  maps->host_rows = slot_of.element_count();
  maps->device_slots = host_of.element_count();
  // Row and slot numbers are i32, and one beyond the last must be a number too.
  if (maps->host_rows >= INT32_MAX || maps->device_slots >= INT32_MAX) {
    return Refuse(target, ": ", maps->host_rows, " host rows and ", maps->device_slots,
                  " slots, but fewer than 2147483647 of each can be numbered");
  }
  ECHO_RETURN_IF_ERROR(SameLength(target, "host_of", maps->device_slots, "priority", priority.element_count()));
  ECHO_RETURN_IF_ERROR(SameLength(target, "host_of", maps->device_slots, "free", free.element_count()));
  maps->slot_of = slot_of.typed_data();
  maps->host_of = host_of.typed_data();
  maps->priority = priority.typed_data();
  maps->free = free.typed_data();
  return ffi::Error::Success();
}

using NumbersResult = ffi::Result<Numbers>;
using CountResults = std::initializer_list<ffi::Result<Number>>;

// All but the rows, their slots, and where the fills are listed. `views->maps` is seen already.
inline ffi::Error ViewList(const char* target, int64_t length, Numbers touched, Numbers staged, CountResults counts,
                           NumbersResult scratch, int64_t scratch_wanted, int64_t per_seat, int64_t new_per_seat,
                           AllocateViews* views) {
  if (per_seat < 1 || length % per_seat != 0 || new_per_seat < 0 || new_per_seat > per_seat) {
    return Refuse(target, ": rows has length ", length, ", per_seat is ", per_seat, " and new_per_seat is ",
                  new_per_seat, "; whole lists of per_seat entries are needed, each with at most so many new rows");
  }
  // Entries are numbered below NO_SLOT while they wait for a slot.
  if (length >= INT32_MAX) return Refuse(target, ": rows has length ", length, " but at most 2147483646 fit");
  views->is_touched_alike = touched.element_count() == 1;
  if (!views->is_touched_alike) {
    ECHO_RETURN_IF_ERROR(SameLength(target, "rows", length, "touched", touched.element_count()));
  }
  ECHO_RETURN_IF_ERROR(SameLength(target, "scratch wanted", scratch_wanted, "scratch", scratch->element_count()));
  views->touched = touched.typed_data();
  views->staged = staged.typed_data();
  views->length = length;
  views->staged_length = staged.element_count();
  views->per_seat = per_seat;
  views->new_per_seat = new_per_seat;
  int32_t** next = views->counts;
  for (const ffi::Result<Number>& count : counts) *next++ = const_cast<ffi::Result<Number>&>(count)->typed_data();
  views->scratch = scratch->typed_data();
  return ffi::Error::Success();
}

inline ffi::Error ViewAllocate(const char* target, Numbers rows, Numbers touched, Numbers staged, NumbersResult slots,
                               NumbersResult fill_rows, NumbersResult fill_slots, NumbersResult fill_mention,
                               NumbersResult fill_source, CountResults counts, NumbersResult scratch, int64_t per_seat,
                               int64_t new_per_seat, AllocateViews* views) {
  const int64_t length = rows.element_count();
  ECHO_RETURN_IF_ERROR(ViewList(target, length, touched, staged, counts, scratch, AllocateScratch(length), per_seat,
                                new_per_seat, views));
  ECHO_RETURN_IF_ERROR(SameLength(target, "rows", length, "slots", slots->element_count()));
  ECHO_RETURN_IF_ERROR(SameLength(target, "rows", length, "fill_rows", fill_rows->element_count()));
  ECHO_RETURN_IF_ERROR(SameLength(target, "rows", length, "fill_slots", fill_slots->element_count()));
  ECHO_RETURN_IF_ERROR(SameLength(target, "rows", length, "fill_mention", fill_mention->element_count()));
  ECHO_RETURN_IF_ERROR(SameLength(target, "rows", length, "fill_source", fill_source->element_count()));
  views->rows = rows.typed_data();
  views->slots = slots->typed_data();
  views->fill_rows = fill_rows->typed_data();
  views->fill_slots = fill_slots->typed_data();
  views->fill_mention = fill_mention->typed_data();
  views->fill_source = fill_source->typed_data();
  return ffi::Error::Success();
}

// What the targets take and give, in order: one list for the handlers of both platforms. `binding` is ffi::Ffi::Bind(),
// on a GPU with the stream.
template <typename Binding>
auto BindMapArguments(Binding&& binding) {
  return std::move(binding)
      .template Arg<Numbers>()  // slot_of
      .template Arg<Numbers>()  // host_of
      .template Arg<Numbers>()  // priority
      .template Arg<Flags>();   // free
}

template <typename Binding>
auto BindMapResults(Binding&& binding) {
  return std::move(binding)
      .template Ret<Numbers>()  // slot_of
      .template Ret<Numbers>()  // host_of
      .template Ret<Numbers>()  // priority
      .template Ret<Flags>();   // free
}

template <typename Binding>
auto BindListResults(Binding&& binding) {
  return std::move(binding)
      .template Ret<Number>()   // to_fill
      .template Ret<Number>()   // hits
      .template Ret<Number>()   // useful
      .template Ret<Number>()   // recalled
      .template Ret<Number>()   // written
      .template Ret<Number>()   // evicted
      .template Ret<Numbers>();  // scratch
}

template <typename Binding>
auto BindAllocate(Binding&& binding) {
  auto taken = BindMapArguments(std::move(binding))
                   .template Arg<Numbers>()   // rows
                   .template Arg<Numbers>()   // touched
                   .template Arg<Numbers>();  // staged
  auto listed = BindMapResults(std::move(taken))
                    .template Ret<Numbers>()   // slots
                    .template Ret<Numbers>()   // fill_rows
                    .template Ret<Numbers>()   // fill_slots
                    .template Ret<Numbers>()   // fill_mention
                    .template Ret<Numbers>();  // fill_source
  return BindListResults(std::move(listed))
      .template Attr<int64_t>("per_seat")
      .template Attr<int64_t>("new_per_seat")
      .template Attr<int64_t>("blocks");
}

template <typename Binding>
auto BindRelease(Binding&& binding) {
  return BindMapResults(BindMapArguments(std::move(binding)).template Arg<Flags>());  // is_dropped
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_SLOTS_H_
