// The operands of the four targets that move records, seen and refused by their shapes alone: one function a target, for
// every platform. Nothing here reads the contents of a buffer; numbers in lists are each platform's own to judge.
#ifndef ECHO_FFI_ROWS_H_
#define ECHO_FFI_ROWS_H_

#include <cstddef>
#include <cstdint>

#include "echo_ffi/records.h"

namespace echo_ffi {

using Numbers = ffi::Buffer<ffi::S32>;

// One layer's place among the records of a whole pool [L, N_H, record].
struct Pool {
  Records records;
  int64_t layers = 0;
  int64_t rows = 0;

  ECHO_HOST_DEVICE std::byte* at(int64_t layer, int64_t row) const { return records.at(layer * rows + row); }
};

inline ffi::Error ViewPool(const char* target, ffi::AnyBuffer buffer, Pool* pool) {
  ECHO_RETURN_IF_ERROR(ViewRecords(target, "host_pool", buffer, 2, &pool->records));
  pool->layers = buffer.dimensions()[0];
  pool->rows = buffer.dimensions()[1];
  return ffi::Error::Success();
}

inline ffi::Error IsList(const char* target, const char* name, Numbers numbers) {
  if (numbers.dimensions().size() == 1) return ffi::Error::Success();
  return Refuse(target, ": ", name, " has shape ", Describe(numbers.dimensions()), " but must be a list");
}

inline ffi::Error IsScalar(const char* target, const char* name, Numbers number) {
  if (number.element_count() == 1) return ffi::Error::Success();
  return Refuse(target, ": ", name, " has shape ", Describe(number.dimensions()), " but must be a scalar");
}

struct RecallViews {
  Records records, fresh, staged;
  Pool pool;
  const int32_t* host_rows = nullptr;
  const int32_t* slots = nullptr;
  const int32_t* source = nullptr;
  int64_t length = 0;
};

// Where records are, and from where they may come; not which.
inline ffi::Error ViewMoved(const char* target, ffi::AnyBuffer records, ffi::AnyBuffer pool, Numbers layer,
                            ffi::AnyBuffer fresh, ffi::AnyBuffer staged, ffi::Result<ffi::AnyBuffer> result,
                            RecallViews* views) {
  ECHO_RETURN_IF_ERROR(ViewRecords(target, "records", records, 1, &views->records));
  ECHO_RETURN_IF_ERROR(ViewRecords(target, "new", fresh, 1, &views->fresh));
  ECHO_RETURN_IF_ERROR(ViewRecords(target, "staged", staged, 1, &views->staged));
  ECHO_RETURN_IF_ERROR(ViewPool(target, pool, &views->pool));
  ECHO_RETURN_IF_ERROR(SameRecords(target, "records", records, 1, "host_pool", pool, 2));
  ECHO_RETURN_IF_ERROR(SameRecords(target, "records", records, 1, "new", fresh, 1));
  ECHO_RETURN_IF_ERROR(SameRecords(target, "records", records, 1, "staged", staged, 1));
  ECHO_RETURN_IF_ERROR(SameBuffer(target, "records", views->records.data, result->untyped_data()));
  return IsScalar(target, "layer", layer);
}

inline ffi::Error ViewRecall(const char* target, ffi::AnyBuffer records, ffi::AnyBuffer pool, Numbers layer,
                             Numbers count, Numbers host_rows, Numbers slots, Numbers source, ffi::AnyBuffer fresh,
                             ffi::AnyBuffer staged, ffi::Result<ffi::AnyBuffer> result, RecallViews* views) {
  ECHO_RETURN_IF_ERROR(ViewMoved(target, records, pool, layer, fresh, staged, result, views));
  ECHO_RETURN_IF_ERROR(IsScalar(target, "count", count));
  ECHO_RETURN_IF_ERROR(IsList(target, "host_rows", host_rows));
  ECHO_RETURN_IF_ERROR(IsList(target, "slots", slots));
  ECHO_RETURN_IF_ERROR(IsList(target, "source", source));
  views->length = host_rows.element_count();
  ECHO_RETURN_IF_ERROR(SameLength(target, "host_rows", views->length, "slots", slots.element_count()));
  ECHO_RETURN_IF_ERROR(SameLength(target, "host_rows", views->length, "source", source.element_count()));
  views->host_rows = host_rows.typed_data();
  views->slots = slots.typed_data();
  views->source = source.typed_data();
  return ffi::Error::Success();
}

inline ffi::Error ViewReadRows(const char* target, ffi::AnyBuffer pool_buffer, Numbers layer, Numbers rows,
                               ffi::Result<ffi::AnyBuffer> result, Pool* pool, Records* out) {
  ECHO_RETURN_IF_ERROR(ViewPool(target, pool_buffer, pool));
  ECHO_RETURN_IF_ERROR(ViewRecords(target, "result", *result, 1, out));
  ECHO_RETURN_IF_ERROR(SameRecords(target, "result", *result, 1, "host_pool", pool_buffer, 2));
  if (layer.dimensions().size() > 1) {
    return Refuse(target, ": layer has shape ", Describe(layer.dimensions()), " but must be a scalar or a list");
  }
  ECHO_RETURN_IF_ERROR(IsList(target, "rows", rows));
  const size_t layers = layer.element_count(), length = rows.element_count();
  if (layers == 0 ? length != 0 : length % layers != 0) {
    return Refuse(target, ": rows has length ", length, " but layer has length ", layers,
                  "; each layer has as many rows as every other");
  }
  return SameLength(target, "rows", length, "result", out->count);
}

inline ffi::Error ViewWriteBack(const char* target, ffi::AnyBuffer pool_buffer, ffi::AnyBuffer records_buffer,
                                Numbers rows, ffi::Result<ffi::AnyBuffer> result, Pool* pool, Records* records) {
  ECHO_RETURN_IF_ERROR(ViewPool(target, pool_buffer, pool));
  ECHO_RETURN_IF_ERROR(ViewRecords(target, "records", records_buffer, 2, records));
  ECHO_RETURN_IF_ERROR(SameRecords(target, "records", records_buffer, 2, "host_pool", pool_buffer, 2));
  ECHO_RETURN_IF_ERROR(SameBuffer(target, "host_pool", pool->records.data, result->untyped_data()));
  ECHO_RETURN_IF_ERROR(IsList(target, "rows", rows));
  ECHO_RETURN_IF_ERROR(
      SameLength(target, "axis 0 of records", records_buffer.dimensions()[0], "axis 0 of host_pool", pool->layers));
  return SameLength(target, "axis 1 of records", records_buffer.dimensions()[1], "rows", rows.element_count());
}

inline ffi::Error ViewCopyRows(const char* target_name, ffi::AnyBuffer pool_buffer, Numbers source, Numbers target,
                               ffi::Result<ffi::AnyBuffer> result, Pool* pool) {
  ECHO_RETURN_IF_ERROR(ViewPool(target_name, pool_buffer, pool));
  ECHO_RETURN_IF_ERROR(SameBuffer(target_name, "host_pool", pool->records.data, result->untyped_data()));
  ECHO_RETURN_IF_ERROR(IsList(target_name, "source", source));
  ECHO_RETURN_IF_ERROR(IsList(target_name, "target", target));
  return SameLength(target_name, "source", source.element_count(), "target", target.element_count());
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_ROWS_H_
