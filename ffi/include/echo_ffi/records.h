// Buffers seen as records, and the refusals that need shapes only. Shared by every platform; nothing here reads the
// contents of a buffer, which on a GPU lie out of reach of the host.
#ifndef ECHO_FFI_RECORDS_H_
#define ECHO_FFI_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "echo_ffi/order.h"
#include "xla/ffi/api/ffi.h"

namespace echo_ffi {

namespace ffi = xla::ffi;

// Bytes that every platform can move as whole words.
inline constexpr int64_t kWordBytes = 4;

template <typename... Parts>
ffi::Error Refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return ffi::Error::InvalidArgument(text.str());
}

// `leading` dimensions of a buffer name a record; the rest are its shape.
struct Records {
  std::byte* data = nullptr;
  int64_t count = 1;         // product of the leading dimensions
  int64_t record_bytes = 0;  // bytes of one record

  ECHO_HOST_DEVICE std::byte* at(int64_t index) const { return data + index * record_bytes; }
};

inline std::string Describe(ffi::AnyBuffer::Dimensions dimensions) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < dimensions.size(); ++i) text << (i ? ", " : "") << dimensions[i];
  text << ']';
  return text.str();
}

// View `buffer` as records behind `leading` dimensions, or say why it is none.
inline ffi::Error ViewRecords(const char* target, const char* name, ffi::AnyBuffer buffer, size_t leading,
                              Records* view) {
  const auto dimensions = buffer.dimensions();
  if (dimensions.size() <= leading) {
    return Refuse(target, ": ", name, " has shape ", Describe(dimensions), " but needs ", leading,
                  " leading dimensions and a record shape");
  }
  int64_t record_bytes = static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()));
  for (size_t i = leading; i < dimensions.size(); ++i) record_bytes *= dimensions[i];
  if (record_bytes % kWordBytes != 0) {
    return Refuse(target, ": a record of ", name, " has ", record_bytes, " bytes, not a multiple of ", kWordBytes,
                  "; pad the record");
  }
  view->data = static_cast<std::byte*>(buffer.untyped_data());
  view->record_bytes = record_bytes;
  view->count = 1;
  for (size_t i = 0; i < leading; ++i) view->count *= dimensions[i];
  return ffi::Error::Success();
}

// The records of `a` (behind `leading_a` dimensions) and `b` must have one element type and one shape.
inline ffi::Error SameRecords(const char* target, const char* name_a, ffi::AnyBuffer a, size_t leading_a,
                              const char* name_b, ffi::AnyBuffer b, size_t leading_b) {
  if (a.element_type() != b.element_type()) {
    return Refuse(target, ": ", name_a, " has element type ", static_cast<int>(a.element_type()), " but ", name_b,
                  " has ", static_cast<int>(b.element_type()), " (XLA's numbers); they must be the same");
  }
  const auto shape_a = a.dimensions();
  const auto shape_b = b.dimensions();
  bool same = shape_a.size() - leading_a == shape_b.size() - leading_b;
  for (size_t i = 0; same && i + leading_a < shape_a.size(); ++i) {
    same = shape_a[i + leading_a] == shape_b[i + leading_b];
  }
  if (!same) {
    return Refuse(target, ": ", name_a, " has shape ", Describe(shape_a), " and ", name_b, " has shape ",
                  Describe(shape_b), "; behind ", leading_a, " and ", leading_b,
                  " leading dimensions the record shapes must be equal");
  }
  return ffi::Error::Success();
}

// Two lists that are read side by side must be equally long, and an axis must have the size that a list implies.
inline ffi::Error SameLength(const char* target, const char* name_a, int64_t length_a, const char* name_b,
                             int64_t length_b) {
  if (length_a == length_b) return ffi::Error::Success();
  return Refuse(target, ": ", name_a, " has length ", length_a, " but ", name_b, " has length ", length_b);
}

// The result of an aliased operand is the operand. XLA keeps this; if it ever did not, the untouched part of the
// result would be garbage, so it is refused and not repaired by a copy of a whole pool.
inline ffi::Error SameBuffer(const char* target, const char* name, const void* operand, const void* result) {
  if (operand == result) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(target) + ": " + name +
                              " and its result are two buffers; call it with input_output_aliases");
}

}  // namespace echo_ffi

// Hand an error on to the caller, or go on.
#define ECHO_RETURN_IF_ERROR(expression)                        \
  do {                                                          \
    xla::ffi::Error echo_error = (expression);                  \
    if (echo_error.failure()) return echo_error;                \
  } while (false)

#endif  // ECHO_FFI_RECORDS_H_
