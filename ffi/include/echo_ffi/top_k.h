// The operands of echo_top_k and echo_bounded_top_k, seen and refused by their shapes alone, for every platform.
// Nothing here reads a score.
#ifndef ECHO_FFI_TOP_K_H_
#define ECHO_FFI_TOP_K_H_

#include <cstdint>
#include <utility>

#include "echo_ffi/order.h"
#include "echo_ffi/records.h"

namespace echo_ffi {

inline constexpr const char* kTopK = "echo_top_k";
inline constexpr const char* kBoundedTopK = "echo_bounded_top_k";

// Words of a row's marks, a bit for each position.
ECHO_HOST_DEVICE constexpr int64_t WordsOfMarks(int64_t length) { return (length + 31) / 32; }

struct TopKViews {
  const void* score = nullptr;
  bool is_bf16 = false;  // else float32
  int64_t rows = 0;      // N
  int64_t length = 0;    // P
  int64_t k = 0;
  const int32_t* visible = nullptr;
  const float* bound = nullptr;     // [N], nullptr for none
  const uint32_t* above = nullptr;  // [N, WordsOfMarks(P)], nullptr for none
  int32_t* positions = nullptr;
  float* kth_score = nullptr;
};

inline ffi::Error ViewTopK(const char* target, ffi::AnyBuffer score, ffi::Buffer<ffi::S32> visible, int64_t k,
                           ffi::Result<ffi::Buffer<ffi::S32>> positions, ffi::Result<ffi::Buffer<ffi::F32>> kth_score,
                           TopKViews* views) {
  const ffi::DataType type = score.element_type();
  if (type != ffi::F32 && type != ffi::BF16) {
    return Refuse(target, ": score has element type ", type, " but F32 or BF16 is needed; convert it");
  }
  const auto shape = score.dimensions();
  if (shape.size() != 2) {
    return Refuse(target, ": score has shape ", Describe(shape), " but must be [rows, positions]");
  }
  const auto listed = positions->dimensions();
  if (k < 1 || listed.size() != 2 || listed[0] != shape[0] || listed[1] != k) {
    return Refuse(target, ": k is ", k, " and positions has shape ", Describe(listed), " but ", shape[0],
                  " rows of scores need [", shape[0], ", k] with k at least 1");
  }
  // Positions are i32.
  if (shape[1] > INT32_MAX) {
    return Refuse(target, ": score has ", shape[1], " positions but at most ", INT32_MAX, " can be numbered");
  }
  ECHO_RETURN_IF_ERROR(SameLength(target, "axis 0 of score", shape[0], "visible", visible.element_count()));
  ECHO_RETURN_IF_ERROR(SameLength(target, "axis 0 of score", shape[0], "kth_score", kth_score->element_count()));
  views->score = score.untyped_data();
  views->is_bf16 = type == ffi::BF16;
  views->rows = shape[0];
  views->length = shape[1];
  views->k = k;
  views->visible = visible.typed_data();
  views->positions = positions->typed_data();
  views->kth_score = kth_score->typed_data();
  return ffi::Error::Success();
}

// The hints of the bounded form; the other operands have been seen before.
inline ffi::Error ViewBound(const char* target, ffi::Buffer<ffi::F32> bound, ffi::Buffer<ffi::U32> above,
                            TopKViews* views) {
  ECHO_RETURN_IF_ERROR(SameLength(target, "axis 0 of score", views->rows, "bound", bound.element_count()));
  const auto marks = above.dimensions();
  const int64_t words = WordsOfMarks(views->length);
  if (marks.size() != 2 || marks[0] != views->rows || (marks[1] != 0 && marks[1] != words)) {
    return Refuse(target, ": above has shape ", Describe(marks), " but ", views->rows, " rows of ", views->length,
                  " scores need [", views->rows, ", ", words, "], or [", views->rows, ", 0] where nothing is marked");
  }
  views->bound = bound.typed_data();
  if (marks[1] != 0) views->above = above.typed_data();
  return ffi::Error::Success();
}

// What the targets take and give, in order: one list for the handlers of both platforms. `binding` is ffi::Ffi::Bind(),
// on a GPU with the stream.
template <typename Binding>
auto BindScores(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // score
      .template Arg<ffi::Buffer<ffi::S32>>();  // visible
}

template <typename Binding>
auto BindSelection(Binding&& binding) {
  return std::move(binding)
      .template Ret<ffi::Buffer<ffi::S32>>()  // positions
      .template Ret<ffi::Buffer<ffi::F32>>()  // kth_score
      .template Attr<int64_t>("k");
}

template <typename Binding>
auto BindTopK(Binding&& binding) {
  return BindSelection(BindScores(std::move(binding)));
}

template <typename Binding>
auto BindBoundedTopK(Binding&& binding) {
  return BindSelection(BindScores(std::move(binding))
                           .template Arg<ffi::Buffer<ffi::F32>>()    // bound
                           .template Arg<ffi::Buffer<ffi::U32>>());  // above
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_TOP_K_H_
