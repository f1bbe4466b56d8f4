// The targets of targets.h on a CPU: one thread, one memcpy per record. Host and device memory are both ordinary
// memory here. All numbers are checked before the first byte moves, so an error leaves every buffer as it was.
//
// One thread on purpose: the lists of a decode step move a few megabytes, which one core does at memory speed, and the
// other cores belong to XLA's own thread pool.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "echo_ffi/rows.h"
#include "echo_ffi/targets.h"
#include "on_cpu.h"

namespace echo_ffi {

namespace {

// Of a scalar or of a list, whose entries are named by their place.
ffi::Error CheckLayers(const char* target, Numbers numbers, int64_t layers) {
  for (size_t index = 0; index < numbers.element_count(); ++index) {
    const int32_t layer = numbers.typed_data()[index];
    if (layer >= 0 && layer < layers) continue;
    const std::string place = numbers.dimensions().size() == 0 ? "" : "[" + std::to_string(index) + "]";
    return Refuse(target, ": layer", place, " is ", layer, " but host_pool holds layers 0 to ", layers - 1);
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error ReadLayer(const char* target, Numbers layer, int64_t layers, int64_t* value) {
  *value = layer.typed_data()[0];
  return CheckLayers(target, layer, layers);
}

ffi::Error RecallOnCpu(const char* target, const RecallViews& views, int64_t layer, int64_t count) {
  const auto& [records, fresh, staged, pool, host_rows_data, slots_data, source_data, length] = views;
  if (count > length) {
    return Refuse(target, ": count is ", count, " but the lists hold ", length, " entries");
  }
  const size_t entries = static_cast<size_t>(std::max<int64_t>(count, 0));
  const ffi::Span<const int32_t> host_rows(host_rows_data, entries), slots(slots_data, entries),
      source(source_data, entries);
  ECHO_RETURN_IF_ERROR(CheckRange(target, "host_rows", host_rows, "host_pool", pool.rows));
  ECHO_RETURN_IF_ERROR(CheckRange(target, "slots", slots, "records", records.count));
  const auto active = [&](size_t m) { return host_rows[m] >= 0 && slots[m] >= 0; };
  const int64_t given = fresh.count + staged.count;
  for (size_t m = 0; m < source.size(); ++m) {
    if (active(m) && (source[m] < kSourceHost || source[m] >= given)) {
      return Refuse(target, ": source[", m, "] is ", source[m], " but new and staged hold ", given,
                    " rows; a value below ", given, " or ", kSourceHost, " (the host pool) is needed");
    }
  }
  for (size_t m = 0; m < slots.size(); ++m) {
    if (!active(m)) continue;
    const std::byte* from = source[m] == kSourceHost   ? pool.at(layer, host_rows[m])
                            : source[m] < fresh.count ? fresh.at(source[m])
                                                      : staged.at(source[m] - fresh.count);
    std::memcpy(records.at(slots[m]), from, records.record_bytes);
  }
  return ffi::Error::Success();
}

namespace {

ffi::Error Recall(ffi::AnyBuffer records_buffer, ffi::AnyBuffer pool_buffer, Numbers layer_number, Numbers count_number,
                  Numbers host_rows_list, Numbers slots_list, Numbers source_list, ffi::AnyBuffer new_buffer,
                  ffi::AnyBuffer staged_buffer, ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_recall";
  RecallViews views;
  ECHO_RETURN_IF_ERROR(ViewRecall(kTarget, records_buffer, pool_buffer, layer_number, count_number, host_rows_list,
                                  slots_list, source_list, new_buffer, staged_buffer, result, &views));
  int64_t layer = 0;
  ECHO_RETURN_IF_ERROR(ReadLayer(kTarget, layer_number, views.pool.layers, &layer));
  return RecallOnCpu(kTarget, views, layer, count_number.typed_data()[0]);
}

ffi::Error Zeros(ffi::AnyBuffer buffer, ffi::Result<ffi::AnyBuffer> result) {
  ECHO_RETURN_IF_ERROR(SameBuffer("echo_zeros", "buffer", buffer.untyped_data(), result->untyped_data()));
  std::memset(result->untyped_data(), 0, result->size_bytes());
  return ffi::Error::Success();
}

ffi::Error ReadRows(ffi::AnyBuffer pool_buffer, Numbers layer_numbers, Numbers rows_list,
                    ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_read_rows";
  Records out;
  Pool pool;
  ECHO_RETURN_IF_ERROR(ViewReadRows(kTarget, pool_buffer, layer_numbers, rows_list, result, &pool, &out));
  const ffi::Span<const int32_t> layers(layer_numbers.typed_data(), layer_numbers.element_count());
  ECHO_RETURN_IF_ERROR(CheckLayers(kTarget, layer_numbers, pool.layers));
  const ffi::Span<const int32_t> rows(rows_list.typed_data(), rows_list.element_count());
  ECHO_RETURN_IF_ERROR(CheckRange(kTarget, "rows", rows, "host_pool", pool.rows));
  const size_t of_layer = rows.size() / std::max<size_t>(layers.size(), 1);
  for (size_t m = 0; m < rows.size();) {
    // A prefill reads whole pages: neighbours in the list that are neighbours in the pool travel together.
    const size_t index = m / of_layer, limit = (index + 1) * of_layer;
    size_t end = m + 1;
    const bool is_padding = rows[m] < 0;
    while (end < limit && (is_padding ? rows[end] < 0 : rows[end] == rows[end - 1] + 1)) ++end;
    const size_t bytes = (end - m) * static_cast<size_t>(out.record_bytes);
    if (is_padding) {
      std::memset(out.at(m), 0, bytes);
    } else {
      std::memcpy(out.at(m), pool.at(layers[index], rows[m]), bytes);
    }
    m = end;
  }
  return ffi::Error::Success();
}

ffi::Error WriteBack(ffi::AnyBuffer pool_buffer, ffi::AnyBuffer records_buffer, Numbers rows_list,
                     ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_write_back";
  Records records;
  Pool pool;
  ECHO_RETURN_IF_ERROR(ViewWriteBack(kTarget, pool_buffer, records_buffer, rows_list, result, &pool, &records));
  const ffi::Span<const int32_t> rows(rows_list.typed_data(), rows_list.element_count());
  ECHO_RETURN_IF_ERROR(CheckRange(kTarget, "rows", rows, "host_pool", pool.rows));
  const int64_t length = static_cast<int64_t>(rows.size());
  for (int64_t layer = 0; layer < pool.layers; ++layer) {
    for (int64_t m = 0; m < length; ++m) {
      if (rows[m] < 0) continue;
      std::memcpy(pool.at(layer, rows[m]), records.at(layer * length + m), records.record_bytes);
    }
  }
  return ffi::Error::Success();
}

// No active target may be the target or the source of another entry. A row copied onto itself is harmless.
ffi::Error CheckCopies(const char* target_name, ffi::Span<const int32_t> source, ffi::Span<const int32_t> target) {
  std::vector<int32_t> written;
  for (size_t m = 0; m < target.size(); ++m) {
    if (source[m] >= 0 && target[m] >= 0) written.push_back(target[m]);
  }
  std::sort(written.begin(), written.end());
  const auto twice = std::adjacent_find(written.begin(), written.end());
  if (twice != written.end()) return Refuse(target_name, ": row ", *twice, " is a target twice in one call");
  for (size_t m = 0; m < source.size(); ++m) {
    if (source[m] < 0 || target[m] < 0 || source[m] == target[m]) continue;
    if (std::binary_search(written.begin(), written.end(), source[m])) {
      return Refuse(target_name, ": row ", source[m], " is both a source and a target in one call; split the call");
    }
  }
  return ffi::Error::Success();
}

ffi::Error CopyRows(ffi::AnyBuffer pool_buffer, Numbers source_list, Numbers target_list,
                    ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_copy_rows";
  Pool pool;
  ECHO_RETURN_IF_ERROR(ViewCopyRows(kTarget, pool_buffer, source_list, target_list, result, &pool));
  const ffi::Span<const int32_t> source(source_list.typed_data(), source_list.element_count());
  const ffi::Span<const int32_t> target(target_list.typed_data(), target_list.element_count());
  ECHO_RETURN_IF_ERROR(CheckRange(kTarget, "source", source, "host_pool", pool.rows));
  ECHO_RETURN_IF_ERROR(CheckRange(kTarget, "target", target, "host_pool", pool.rows));
  ECHO_RETURN_IF_ERROR(CheckCopies(kTarget, source, target));
  for (int64_t layer = 0; layer < pool.layers; ++layer) {
    for (size_t m = 0; m < target.size(); ++m) {
      if (source[m] < 0 || target[m] < 0 || source[m] == target[m]) continue;
      std::memcpy(pool.at(layer, target[m]), pool.at(layer, source[m]), pool.records.record_bytes);
    }
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoRecallCpu, Recall,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()   // records
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<Numbers>()          // layer
                                  .Arg<Numbers>()          // count
                                  .Arg<Numbers>()          // host_rows
                                  .Arg<Numbers>()          // slots
                                  .Arg<Numbers>()          // source
                                  .Arg<ffi::AnyBuffer>()   // new
                                  .Arg<ffi::AnyBuffer>()   // staged
                                  .Ret<ffi::AnyBuffer>());  // records

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoZerosCpu, Zeros, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoReadRowsCpu, ReadRows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<Numbers>()          // layer
                                  .Arg<Numbers>()          // rows
                                  .Ret<ffi::AnyBuffer>());  // rows' records

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoWriteBackCpu, WriteBack,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<ffi::AnyBuffer>()   // records
                                  .Arg<Numbers>()          // rows
                                  .Ret<ffi::AnyBuffer>());  // host_pool

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoCopyRowsCpu, CopyRows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<Numbers>()          // source
                                  .Arg<Numbers>()          // target
                                  .Ret<ffi::AnyBuffer>());  // host_pool

}  // namespace echo_ffi
