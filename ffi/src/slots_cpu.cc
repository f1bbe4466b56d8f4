// echo_allocate and echo_release on a CPU: one thread, in the order of pool.allocate in echo_jax/pool.py.
//
// What takes time is random access to the maps, one or two a mention, and three passes over the priorities where
// victims are needed; nothing is sorted that is not taken. All numbers are checked, and the slots counted, before the
// first map changes for good, so a refusal leaves every buffer as it was.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "echo_ffi/slots.h"
#include "echo_ffi/targets.h"
#include "on_cpu.h"

namespace echo_ffi {
namespace {

// ---- who goes ----------------------------------------------------------------------------------------------------------

// What is known of the priorities before any slot is chosen.
struct Census {
  int64_t free = 0;
  int32_t lowest = kProtected;  // of the slots in use that are not protected
  int32_t highest = kFreePriority;
};

Census Look(const int32_t* priority, int64_t slots) {
  Census census;
  // Local, and without branches: the compiler then takes several slots at once.
  int32_t free = 0, lowest = kProtected, highest = kFreePriority;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int32_t value = priority[slot];
    free += value == kFreePriority;
    lowest = std::min(lowest, value == kFreePriority ? kProtected : value);
    highest = std::max(highest, value == kProtected ? kFreePriority : value);
  }
  census.free = free;
  census.lowest = lowest;
  census.highest = highest;
  return census;
}

// The `wanted` slots in use of lowest (priority, slot), in this order, appended to `taken`. They are sorted into bins of
// near priorities first, slot by slot, so that only bins that hold more than one priority are sorted by comparison. As
// a rule that is none: priorities are steps, and the oldest of them are few.
void TakeVictims(const int32_t* priority, int64_t slots, const Census& census, int64_t wanted,
                 std::vector<int32_t>* taken) {
  constexpr int kBins = 4096;
  const uint32_t range = static_cast<uint32_t>(census.highest) - static_cast<uint32_t>(census.lowest);
  int shift = 0;
  while (range >> shift >= kBins) ++shift;
  const auto bin_of = [&](int32_t value) {
    return (static_cast<uint32_t>(value) - static_cast<uint32_t>(census.lowest)) >> shift;
  };
  const auto is_candidate = [](int32_t value) { return value != kFreePriority && value != kProtected; };

  // Two counts side by side: equal neighbours would wait for each other's increment.
  uint32_t counted[2][kBins] = {};
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (is_candidate(priority[slot])) ++counted[slot & 1][bin_of(priority[slot])];
  }
  std::vector<int64_t> start;  // of each bin that is needed; one more at the end
  int64_t total = 0;
  for (int bin = 0; total < wanted; ++bin) {
    start.push_back(total);
    total += counted[0][bin] + counted[1][bin];
  }
  const uint32_t bins = static_cast<uint32_t>(start.size());
  start.push_back(total);

  std::vector<int64_t> next(start);
  std::vector<uint64_t> chosen(total);  // priority above slot: in the order of (priority, slot)
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int32_t value = priority[slot];
    if (!is_candidate(value) || bin_of(value) >= bins) continue;
    const uint64_t ordered = static_cast<uint32_t>(value) ^ 0x80000000u;
    chosen[next[bin_of(value)]++] = ordered << 32 | static_cast<uint64_t>(slot);
  }
  if (shift > 0) {
    for (uint32_t bin = 0; bin + 1 < bins; ++bin) {
      std::sort(chosen.begin() + start[bin], chosen.begin() + start[bin + 1]);
    }
    std::partial_sort(chosen.begin() + start[bins - 1], chosen.begin() + wanted, chosen.end());
  }
  for (int64_t i = 0; i < wanted; ++i) taken->push_back(static_cast<int32_t>(chosen[i]));
}

// The `wanted` slots that are not protected of lowest (priority, slot), or all where they are fewer, in this order. Free
// slots have the lowest priority there is.
std::vector<int32_t> Take(const int32_t* priority, int64_t slots, int64_t wanted, int64_t* evicted) {
  std::vector<int32_t> taken;
  taken.reserve(wanted);
  const Census census = Look(priority, slots);
  const int64_t from_free = std::min(wanted, census.free);
  for (int64_t slot = 0; static_cast<int64_t>(taken.size()) < from_free; ++slot) {
    if (priority[slot] == kFreePriority) taken.push_back(static_cast<int32_t>(slot));
  }
  *evicted = wanted - from_free;
  if (*evicted > 0) TakeVictims(priority, slots, census, *evicted, &taken);
  return taken;
}

// ---- echo_allocate -----------------------------------------------------------------------------------------------------

}  // namespace

ffi::Error AllocateOnCpu(const char* target, const AllocateViews& list) {
  const Maps& maps = list.maps;
  const int32_t* rows = list.rows;
  const int32_t length = static_cast<int32_t>(list.length);
  const ffi::Span<const int32_t> listed(rows, static_cast<size_t>(length));
  const ffi::Span<const int32_t> staged(list.staged, static_cast<size_t>(list.staged_length));
  ECHO_RETURN_IF_ERROR(CheckRange(target, "rows", listed, "slot_of", maps.host_rows));
  ECHO_RETURN_IF_ERROR(CheckRange(target, "staged", staged, "slot_of", maps.host_rows));

  // Who is here. A missing row's first mention leaves its marker in slot_of, below NO_SLOT: it is the place where the
  // other mentions and the staged rows find it.
  const auto marker = [length](int32_t mention) { return mention - length - 1; };
  const auto mention_of = [length](int32_t marker) { return marker + length + 1; };
  std::vector<int32_t> missing;  // first mentions, in list order
  std::vector<uint64_t> is_used((maps.device_slots + 63) / 64);
  int64_t hits = 0;
  for (int32_t m = 0; m < length; ++m) {
    if (rows[m] < 0) {
      list.slots[m] = kNoSlot;
      continue;
    }
    int32_t& slot = maps.slot_of[rows[m]];
    list.slots[m] = slot;
    if (slot >= 0) {
      const uint64_t bit = uint64_t{1} << (slot & 63);
      hits += (is_used[slot >> 6] & bit) == 0;
      is_used[slot >> 6] |= bit;
    } else if (slot == kNoSlot) {
      list.slots[m] = slot = marker(m);
      missing.push_back(m);
    }
  }
  const int64_t wanted = static_cast<int64_t>(missing.size());
  if (hits + wanted > maps.device_slots) {
    for (const int32_t m : missing) maps.slot_of[rows[m]] = kNoSlot;
    return Refuse(target, ": the list has ", hits + wanted, " different rows but the pool holds ", maps.device_slots,
                  "; raise device_slots or lower the batch");
  }

  // Where staged rows lie, by the mention that they will be filled for. fill_source is free until the fills are listed.
  int32_t* staged_place = list.fill_source;
  if (wanted > 0) {
    for (const int32_t m : missing) staged_place[m] = kSourceHost;
    for (int64_t e = 0; e < list.staged_length; ++e) {
      if (list.staged[e] < 0) continue;
      const int32_t slot = maps.slot_of[list.staged[e]];
      if (slot >= kNoSlot) continue;
      int32_t& place = staged_place[mention_of(slot)];
      if (place == kSourceHost) place = static_cast<int32_t>(e);
    }
  }

  // Protected while slots are taken; what the mentions say of their priority is written below.
  for (int32_t m = 0; m < length; ++m) {
    if (list.slots[m] >= 0) maps.priority[list.slots[m]] = kProtected;
  }
  int64_t evicted = 0;
  if (wanted > 0) {
    const std::vector<int32_t> taken = Take(maps.priority, maps.device_slots, wanted, &evicted);
    for (int64_t rank = 0; rank < wanted; ++rank) {
      const int32_t slot = taken[rank], row = rows[missing[rank]];
      if (maps.host_of[slot] != kNoRow) maps.slot_of[maps.host_of[slot]] = kNoSlot;
      maps.slot_of[row] = slot;
      maps.host_of[slot] = row;
      maps.free[slot] = false;
      maps.priority[slot] = kProtected;
    }
  }
  for (int32_t m = 0; m < length; ++m) {
    if (list.slots[m] < kNoSlot) list.slots[m] = maps.slot_of[rows[m]];
    if (list.slots[m] >= 0) maps.priority[list.slots[m]] = kFreePriority;
  }
  for (int32_t m = 0; m < length; ++m) {
    if (list.slots[m] < 0) continue;
    const int32_t given = std::clamp(list.Touched(m), kFreePriority + 1, kProtected - 1);
    maps.priority[list.slots[m]] = std::max(maps.priority[list.slots[m]], given);
  }

  // What to copy: new rows and first mentions of missing ones.
  const int32_t new_rows = static_cast<int32_t>(list.count_of_new());
  size_t rank = 0;
  int32_t fills = 0, useful = 0, recalled = 0, written = 0;
  for (int32_t m = 0, place = 0; m < length; ++m, place = place + 1 == list.per_seat ? 0 : place + 1) {
    const bool is_first = rank < missing.size() && missing[rank] == m;
    const bool is_new = place < list.new_per_seat && list.slots[m] >= 0;
    rank += is_first;
    if (!is_first && !is_new) continue;
    int32_t source = is_new ? list.NewPlace(m) : staged_place[m];
    if (!is_new && source != kSourceHost) source += new_rows;
    written += is_new;
    useful += !is_new && source != kSourceHost;
    recalled += source == kSourceHost;
    list.fill_rows[fills] = rows[m];
    list.fill_slots[fills] = list.slots[m];
    list.fill_mention[fills] = m;
    list.fill_source[fills++] = source;
  }
  for (int32_t* filled : {list.fill_rows, list.fill_slots, list.fill_mention, list.fill_source}) {
    std::fill(filled + fills, filled + length, -1);
  }
  *list.counts[kToFill] = fills;
  *list.counts[kHits] = static_cast<int32_t>(hits);
  *list.counts[kUseful] = useful;
  *list.counts[kRecalled] = recalled;
  *list.counts[kWritten] = written;
  *list.counts[kEvicted] = static_cast<int32_t>(evicted);
  return ffi::Error::Success();
}

namespace {

ffi::Error Allocate(Numbers slot_of_list, Numbers host_of_list, Numbers priority_list, Flags free_list, Numbers rows_list,
                    Numbers touched_list, Numbers staged_list, ffi::Result<Numbers> slot_of_result,
                    ffi::Result<Numbers> host_of_result, ffi::Result<Numbers> priority_result,
                    ffi::Result<Flags> free_result, ffi::Result<Numbers> slots_result,
                    ffi::Result<Numbers> fill_rows_result, ffi::Result<Numbers> fill_slots_result,
                    ffi::Result<Numbers> fill_mention_result, ffi::Result<Numbers> fill_source_result,
                    ffi::Result<Number> to_fill, ffi::Result<Number> hits_result, ffi::Result<Number> useful_result,
                    ffi::Result<Number> recalled_result, ffi::Result<Number> written_result,
                    ffi::Result<Number> evicted_result, ffi::Result<Numbers> scratch_result, int64_t per_seat,
                    int64_t new_per_seat, int64_t /*blocks, of a GPU*/) {
  constexpr const char* kTarget = "echo_allocate";
  AllocateViews list;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of_list, host_of_list, priority_list, free_list, slot_of_result,
                                host_of_result, priority_result, free_result, &list.maps));
  ECHO_RETURN_IF_ERROR(ViewAllocate(kTarget, rows_list, touched_list, staged_list, slots_result, fill_rows_result, fill_slots_result, fill_mention_result,
                                    fill_source_result,
                                    {to_fill, hits_result, useful_result, recalled_result, written_result,
                                     evicted_result},
                                    scratch_result, per_seat, new_per_seat, &list));
  return AllocateOnCpu(kTarget, list);
}

// ---- echo_release ------------------------------------------------------------------------------------------------------

ffi::Error Release(Numbers slot_of_list, Numbers host_of_list, Numbers priority_list, Flags free_list,
                   Flags is_dropped_list, ffi::Result<Numbers> slot_of_result, ffi::Result<Numbers> host_of_result,
                   ffi::Result<Numbers> priority_result, ffi::Result<Flags> free_result) {
  constexpr const char* kTarget = "echo_release";
  Maps maps;
  ECHO_RETURN_IF_ERROR(ViewMaps(kTarget, slot_of_list, host_of_list, priority_list, free_list, slot_of_result,
                                host_of_result, priority_result, free_result, &maps));
  ECHO_RETURN_IF_ERROR(
      SameLength(kTarget, "slot_of", maps.host_rows, "is_dropped", is_dropped_list.element_count()));
  const bool* is_dropped = is_dropped_list.typed_data();
  for (int64_t slot = 0; slot < maps.device_slots; ++slot) {
    if (maps.free[slot] || !is_dropped[maps.host_of[slot]]) continue;
    maps.host_of[slot] = kNoRow;
    maps.priority[slot] = kFreePriority;
    maps.free[slot] = true;
  }
  for (int64_t row = 0; row < maps.host_rows; ++row) {
    if (is_dropped[row]) maps.slot_of[row] = kNoSlot;
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoAllocateCpu, Allocate, BindAllocate(ffi::Ffi::Bind()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoReleaseCpu, Release, BindRelease(ffi::Ffi::Bind()));

}  // namespace echo_ffi
