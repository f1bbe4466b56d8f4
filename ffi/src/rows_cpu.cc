// The targets of targets.h on a CPU: one thread, one memcpy per record. Host and device memory are both ordinary
// memory here. All numbers are checked before the first byte moves, so an error leaves every buffer as it was.
//
// One thread on purpose: the lists of a decode step move a few megabytes, which one core does at memory speed, and the
// other cores belong to XLA's own thread pool.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "echo_ffi/records.h"
#include "echo_ffi/targets.h"

namespace echo_ffi {
namespace {

using Numbers = ffi::Buffer<ffi::S32>;

// One layer's place among the records of a whole pool [L, N_H, record].
struct Pool {
  Records records;
  int64_t layers = 0;
  int64_t rows = 0;

  std::byte* at(int64_t layer, int64_t row) const { return records.at(layer * rows + row); }
};

ffi::Error ViewPool(const char* target, ffi::AnyBuffer buffer, Pool* pool) {
  ECHO_RETURN_IF_ERROR(ViewRecords(target, "host_pool", buffer, 2, &pool->records));
  pool->layers = buffer.dimensions()[0];
  pool->rows = buffer.dimensions()[1];
  return ffi::Error::Success();
}

ffi::Error ViewList(const char* target, const char* name, Numbers numbers, ffi::Span<const int32_t>* list) {
  if (numbers.dimensions().size() != 1) {
    return Refuse(target, ": ", name, " has shape ", Describe(numbers.dimensions()), " but must be a list");
  }
  *list = ffi::Span<const int32_t>(numbers.typed_data(), numbers.element_count());
  return ffi::Error::Success();
}

ffi::Error ReadLayer(const char* target, Numbers layer, int64_t layers, int64_t* value) {
  if (layer.element_count() != 1) {
    return Refuse(target, ": layer has shape ", Describe(layer.dimensions()), " but must be a scalar");
  }
  *value = layer.typed_data()[0];
  if (*value < 0 || *value >= layers) {
    return Refuse(target, ": layer is ", *value, " but host_pool holds layers 0 to ", layers - 1);
  }
  return ffi::Error::Success();
}

ffi::Error OutOfRange(const char* target, const char* name, size_t index, int32_t value, const char* of,
                      int64_t limit) {
  return Refuse(target, ": ", name, "[", index, "] is ", value, " but ", of, " holds ", limit,
                " rows; a value below ", limit, " or a negative one (skip) is needed");
}

// Every entry is negative (skip) or below `limit`.
ffi::Error CheckRange(const char* target, const char* name, ffi::Span<const int32_t> list, const char* of,
                      int64_t limit) {
  for (size_t m = 0; m < list.size(); ++m) {
    if (list[m] >= limit) return OutOfRange(target, name, m, list[m], of, limit);
  }
  return ffi::Error::Success();
}

ffi::Error Recall(ffi::AnyBuffer records_buffer, ffi::AnyBuffer pool_buffer, Numbers layer_number,
                  Numbers host_rows_list, Numbers slots_list, Numbers source_list, ffi::AnyBuffer extra_buffer,
                  ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_recall";
  Records records, extra;
  Pool pool;
  int64_t layer = 0;
  ffi::Span<const int32_t> host_rows, slots, source;
  ECHO_RETURN_IF_ERROR(ViewRecords(kTarget, "records", records_buffer, 1, &records));
  ECHO_RETURN_IF_ERROR(ViewRecords(kTarget, "extra", extra_buffer, 1, &extra));
  ECHO_RETURN_IF_ERROR(ViewPool(kTarget, pool_buffer, &pool));
  ECHO_RETURN_IF_ERROR(SameRecords(kTarget, "records", records_buffer, 1, "host_pool", pool_buffer, 2));
  ECHO_RETURN_IF_ERROR(SameRecords(kTarget, "records", records_buffer, 1, "extra", extra_buffer, 1));
  ECHO_RETURN_IF_ERROR(SameBuffer(kTarget, "records", records.data, result->untyped_data()));
  ECHO_RETURN_IF_ERROR(ReadLayer(kTarget, layer_number, pool.layers, &layer));
  ECHO_RETURN_IF_ERROR(ViewList(kTarget, "host_rows", host_rows_list, &host_rows));
  ECHO_RETURN_IF_ERROR(ViewList(kTarget, "slots", slots_list, &slots));
  ECHO_RETURN_IF_ERROR(ViewList(kTarget, "source", source_list, &source));
  ECHO_RETURN_IF_ERROR(SameLength(kTarget, "host_rows", host_rows.size(), "slots", slots.size()));
  ECHO_RETURN_IF_ERROR(SameLength(kTarget, "host_rows", host_rows.size(), "source", source.size()));
  ECHO_RETURN_IF_ERROR(CheckRange(kTarget, "host_rows", host_rows, "host_pool", pool.rows));
  ECHO_RETURN_IF_ERROR(CheckRange(kTarget, "slots", slots, "records", records.count));
  const auto active = [&](size_t m) { return host_rows[m] >= 0 && slots[m] >= 0; };
  for (size_t m = 0; m < source.size(); ++m) {
    if (active(m) && (source[m] < kSourceHost || source[m] >= extra.count)) {
      return Refuse(kTarget, ": source[", m, "] is ", source[m], " but extra holds ", extra.count,
                    " rows; a value below ", extra.count, " or ", kSourceHost, " (the host pool) is needed");
    }
  }
  for (size_t m = 0; m < slots.size(); ++m) {
    if (!active(m)) continue;
    const std::byte* from = source[m] == kSourceHost ? pool.at(layer, host_rows[m]) : extra.at(source[m]);
    std::memcpy(records.at(slots[m]), from, records.record_bytes);
  }
  return ffi::Error::Success();
}

ffi::Error ReadRows(ffi::AnyBuffer pool_buffer, Numbers layer_number, Numbers rows_list,
                    ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_read_rows";
  Records out;
  Pool pool;
  int64_t layer = 0;
  ffi::Span<const int32_t> rows;
  ECHO_RETURN_IF_ERROR(ViewPool(kTarget, pool_buffer, &pool));
  ECHO_RETURN_IF_ERROR(ViewRecords(kTarget, "result", *result, 1, &out));
  ECHO_RETURN_IF_ERROR(SameRecords(kTarget, "result", *result, 1, "host_pool", pool_buffer, 2));
  ECHO_RETURN_IF_ERROR(ReadLayer(kTarget, layer_number, pool.layers, &layer));
  ECHO_RETURN_IF_ERROR(ViewList(kTarget, "rows", rows_list, &rows));
  ECHO_RETURN_IF_ERROR(SameLength(kTarget, "rows", rows.size(), "result", out.count));
  ECHO_RETURN_IF_ERROR(CheckRange(kTarget, "rows", rows, "host_pool", pool.rows));
  for (size_t m = 0; m < rows.size();) {
    // A prefill reads whole pages: neighbours in the list that are neighbours in the pool travel together.
    size_t end = m + 1;
    const bool is_padding = rows[m] < 0;
    while (end < rows.size() && (is_padding ? rows[end] < 0 : rows[end] == rows[end - 1] + 1)) ++end;
    const size_t bytes = (end - m) * static_cast<size_t>(out.record_bytes);
    if (is_padding) {
      std::memset(out.at(m), 0, bytes);
    } else {
      std::memcpy(out.at(m), pool.at(layer, rows[m]), bytes);
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
  ffi::Span<const int32_t> rows;
  ECHO_RETURN_IF_ERROR(ViewPool(kTarget, pool_buffer, &pool));
  ECHO_RETURN_IF_ERROR(ViewRecords(kTarget, "records", records_buffer, 2, &records));
  ECHO_RETURN_IF_ERROR(SameRecords(kTarget, "records", records_buffer, 2, "host_pool", pool_buffer, 2));
  ECHO_RETURN_IF_ERROR(SameBuffer(kTarget, "host_pool", pool.records.data, result->untyped_data()));
  ECHO_RETURN_IF_ERROR(ViewList(kTarget, "rows", rows_list, &rows));
  ECHO_RETURN_IF_ERROR(SameLength(kTarget, "axis 0 of records", records_buffer.dimensions()[0],
                                  "axis 0 of host_pool", pool.layers));
  ECHO_RETURN_IF_ERROR(SameLength(kTarget, "axis 1 of records", records_buffer.dimensions()[1], "rows", rows.size()));
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
  ffi::Span<const int32_t> source, target;
  ECHO_RETURN_IF_ERROR(ViewPool(kTarget, pool_buffer, &pool));
  ECHO_RETURN_IF_ERROR(SameBuffer(kTarget, "host_pool", pool.records.data, result->untyped_data()));
  ECHO_RETURN_IF_ERROR(ViewList(kTarget, "source", source_list, &source));
  ECHO_RETURN_IF_ERROR(ViewList(kTarget, "target", target_list, &target));
  ECHO_RETURN_IF_ERROR(SameLength(kTarget, "source", source.size(), "target", target.size()));
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
                                  .Arg<Numbers>()          // host_rows
                                  .Arg<Numbers>()          // slots
                                  .Arg<Numbers>()          // source
                                  .Arg<ffi::AnyBuffer>()   // extra
                                  .Ret<ffi::AnyBuffer>());  // records

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
