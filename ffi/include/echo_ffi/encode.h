// echo_encode: its operands, refused by their shapes alone, and its work, for every platform. The work is a list of jobs
// that need nothing of each other: a head of the query, a key, or a part of a record. A job is done by a team, which is
// a thread of a CPU or a warp of a GPU; the team is all in which platforms differ.
#ifndef ECHO_FFI_ENCODE_H_
#define ECHO_FFI_ENCODE_H_

#include <cstdint>
#include <utility>

#include "echo_ffi/records.h"
#include "echo_ffi/stored.h"

namespace echo_ffi {

inline constexpr const char* kEncode = "echo_encode";
inline constexpr int64_t kKeysPerPage = 64;
inline constexpr int64_t kBlock = 128;  // values of a record that share a scale; of other forms, a team's share

struct EncodeViews {
  Form keys_form = Form::kFloat32, records_form = Form::kFloat32;
  int64_t width = 0;  // of a key and of a head of the query
  std::byte* pages = nullptr;
  int64_t host_rows = 0;
  const int32_t* rows = nullptr;
  const float* key = nullptr;
  int64_t tokens = 0;  // M
  const float* record = nullptr;
  int64_t latent = 0, rope = 0;
  std::byte* stored = nullptr;
  const float* query = nullptr;
  const float* weights = nullptr;
  int64_t heads = 0;  // N G
  std::byte* codes = nullptr;
  float* scaled = nullptr;

  // Of a key, or a head of the query; a page holds keys, then a scale for each where they are FP8.
  ECHO_HOST_DEVICE int64_t key_bytes() const { return StoredBytes(keys_form, width); }
  ECHO_HOST_DEVICE int64_t page_bytes() const {
    return kKeysPerPage * (key_bytes() + (keys_form == Form::kFp8 ? 4 : 0));
  }
  ECHO_HOST_DEVICE int64_t blocks() const { return latent / kBlock; }
  ECHO_HOST_DEVICE int64_t record_bytes() const {
    return records_form == Form::kFp8 ? latent + 4 * blocks() + 2 * rope : StoredBytes(records_form, latent + rope);
  }
  // Teams that a record keeps busy: of FP8 one for each block and one for the rest.
  ECHO_HOST_DEVICE int64_t parts() const {
    return records_form == Form::kFp8 ? blocks() + 1 : (latent + rope + kBlock - 1) / kBlock;
  }
  ECHO_HOST_DEVICE int64_t jobs() const { return heads + tokens * (1 + parts()); }
};

// ---- the work ----------------------------------------------------------------------------------------------------------

// A team has a `lane` of so many `lanes`, `Read` for four values at a multiple of four, and `Largest` over all lanes.
template <typename Team>
ECHO_HOST_DEVICE uint32_t LargestOf(const Team& team, const float* values, int64_t groups) {
  uint32_t largest = 0;
  for (int64_t group = team.lane; group < groups; group += team.lanes) {
    const uint32_t found = LargestMagnitude(team.Read(values + kFour * group));
    largest = found > largest ? found : largest;
  }
  return team.Largest(largest);
}

template <typename Team>
ECHO_HOST_DEVICE void Store(const Team& team, Form form, const float* values, int64_t groups, float scale,
                            std::byte* at) {
  for (int64_t group = team.lane; group < groups; group += team.lanes) {
    StoreFour(form, reinterpret_cast<uint32_t*>(at), group, team.Read(values + kFour * group), scale);
  }
}

// A key or a head of the query. Returns its scale, 1 where the form has none.
template <typename Team>
ECHO_HOST_DEVICE float StoreKey(const Team& team, const EncodeViews& views, const float* values, std::byte* at) {
  const int64_t groups = views.width / kFour;
  const float scale = views.keys_form == Form::kFp8 ? KeyScale(LargestOf(team, values, groups)) : 1.0f;
  Store(team, views.keys_form, values, groups, scale, at);
  return scale;
}

template <typename Team>
ECHO_HOST_DEVICE void AppendKey(const Team& team, const EncodeViews& views, int64_t index) {
  const int64_t row = views.rows[index];
  if (row < 0 || row >= views.host_rows) return;
  std::byte* const page = views.pages + row / kKeysPerPage * views.page_bytes();
  const int64_t place = row % kKeysPerPage;
  const float scale = StoreKey(team, views, views.key + index * views.width, page + place * views.key_bytes());
  if (views.keys_form == Form::kFp8 && team.lane == 0) {
    reinterpret_cast<float*>(page + kKeysPerPage * views.key_bytes())[place] = scale;
  }
}

template <typename Team>
ECHO_HOST_DEVICE void StoreRecordPart(const Team& team, const EncodeViews& views, int64_t index, int64_t part) {
  const int64_t width = views.latent + views.rope;
  const float* const values = views.record + index * width;
  std::byte* const stored = views.stored + index * views.record_bytes();
  const int64_t first = part * kBlock;
  if (views.records_form != Form::kFp8) {
    const int64_t count = width - first < kBlock ? width - first : kBlock;
    Store(team, views.records_form, values + first, count / kFour, 1.0f,
          stored + StoredBytes(views.records_form, first));
  } else if (part == views.blocks()) {
    Store(team, Form::kBfloat16, values + views.latent, views.rope / kFour, 1.0f,
          stored + views.latent + 4 * views.blocks());
  } else {
    const float scale = RecordScale(LargestOf(team, values + first, kBlock / kFour));
    Store(team, Form::kFp8, values + first, kBlock / kFour, scale, stored + first);
    if (team.lane == 0) reinterpret_cast<float*>(stored + views.latent)[part] = scale;
  }
}

template <typename Team>
ECHO_HOST_DEVICE void DoJob(const Team& team, const EncodeViews& views, int64_t job) {
  if (job < views.heads) {
    const float scale =
        StoreKey(team, views, views.query + job * views.width, views.codes + job * views.key_bytes());
    // Not times 1, which would make a zero of a subnormal number where the processor is told to.
    const float weight = views.weights[job];
    if (team.lane == 0) views.scaled[job] = views.keys_form == Form::kFp8 ? weight * scale : weight;
    return;
  }
  job -= views.heads;
  if (job < views.tokens) return AppendKey(team, views, job);
  job -= views.tokens;
  StoreRecordPart(team, views, job / views.parts(), job % views.parts());
}

// ---- the border --------------------------------------------------------------------------------------------------------

inline ffi::Error FormOf(const char* name, ffi::DataType type, ffi::DataType fp8, Form* form) {
  if (type == ffi::F32) {
    *form = Form::kFloat32;
  } else if (type == ffi::BF16) {
    *form = Form::kBfloat16;
  } else if (type == fp8) {
    *form = Form::kFp8;
  } else {
    return Refuse(kEncode, ": ", name, " has element type ", type, " but ", fp8, " (FP8), BF16 or F32 is needed");
  }
  return ffi::Error::Success();
}

inline int64_t Last(ffi::AnyBuffer::Dimensions dimensions) {
  return dimensions.size() == 0 ? 1 : dimensions[dimensions.size() - 1];
}

template <typename Buffer>
ffi::Error HasBytes(const char* name, Buffer buffer, int64_t rows, int64_t row_bytes, const char* of) {
  const int64_t bytes = static_cast<int64_t>(buffer.size_bytes());
  if (bytes == rows * row_bytes) return ffi::Error::Success();
  return Refuse(kEncode, ": ", name, " has ", bytes, " bytes but ", rows, " ", of, " of ", row_bytes, " bytes need ",
                rows * row_bytes);
}

inline ffi::Error ViewEncode(ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> key,
                             ffi::Buffer<ffi::F32> record, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> weights,
                             int64_t latent, ffi::Result<ffi::AnyBuffer> pages_after, ffi::Result<ffi::AnyBuffer> stored,
                             ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::Buffer<ffi::F32>> scaled,
                             EncodeViews* views) {
  ECHO_RETURN_IF_ERROR(FormOf("index_keys", pages.element_type(), ffi::U8, &views->keys_form));
  ECHO_RETURN_IF_ERROR(FormOf("stored", stored->element_type(), ffi::U32, &views->records_form));
  Form codes_form = Form::kFloat32;
  ECHO_RETURN_IF_ERROR(FormOf("codes", codes->element_type(), ffi::F8E4M3FN, &codes_form));
  if (codes_form != views->keys_form) {
    return Refuse(kEncode, ": index_keys has element type ", pages.element_type(), " but codes has ",
                  codes->element_type(), "; a query is stored as keys are");
  }
  ECHO_RETURN_IF_ERROR(SameBuffer(kEncode, "index_keys", pages.untyped_data(), pages_after->untyped_data()));
  views->width = Last(key.dimensions());
  views->latent = latent;
  views->rope = Last(record.dimensions()) - latent;
  if (latent < 0 || views->rope < 0) {
    return Refuse(kEncode, ": latent is ", latent, " but a record has ", Last(record.dimensions()), " values");
  }
  if (views->width % kFour != 0 || latent % kFour != 0 || views->rope % kFour != 0) {
    return Refuse(kEncode, ": keys of ", views->width, " values, and records of ", latent, " + ", views->rope,
                  ", are not all multiples of ", kFour, "; use the implementation 'jnp'");
  }
  if (views->records_form == Form::kFp8 && latent % kBlock != 0) {
    return Refuse(kEncode, ": latent is ", latent, " but FP8 records need a multiple of ", kBlock,
                  "; use records of another form");
  }
  views->tokens = rows.element_count();
  views->heads = weights.element_count();
  const int64_t value = static_cast<int64_t>(sizeof(float));
  ECHO_RETURN_IF_ERROR(
      SameLength(kEncode, "the last axis of index_key", views->width, "that of query", Last(query.dimensions())));
  ECHO_RETURN_IF_ERROR(HasBytes("index_key", key, views->tokens, views->width * value, "rows"));
  ECHO_RETURN_IF_ERROR(HasBytes("record", record, views->tokens, (latent + views->rope) * value, "rows"));
  ECHO_RETURN_IF_ERROR(HasBytes("query", query, views->heads, views->width * value, "weights"));
  ECHO_RETURN_IF_ERROR(HasBytes("codes", *codes, views->heads, views->key_bytes(), "weights"));
  ECHO_RETURN_IF_ERROR(HasBytes("scaled", *scaled, views->heads, value, "weights"));
  ECHO_RETURN_IF_ERROR(HasBytes("stored", *stored, views->tokens, views->record_bytes(), "rows"));
  const auto shape = pages.dimensions();
  const int64_t count = shape.size() == 0 ? 0 : shape[0];
  ECHO_RETURN_IF_ERROR(HasBytes("index_keys", pages, count, views->page_bytes(), "pages"));
  views->pages = static_cast<std::byte*>(pages.untyped_data());
  views->host_rows = count * kKeysPerPage;
  views->rows = rows.typed_data();
  views->key = key.typed_data();
  views->record = record.typed_data();
  views->stored = static_cast<std::byte*>(stored->untyped_data());
  views->query = query.typed_data();
  views->weights = weights.typed_data();
  views->codes = static_cast<std::byte*>(codes->untyped_data());
  views->scaled = scaled->typed_data();
  return ffi::Error::Success();
}

// What the target takes and gives, in order. `binding` is ffi::Ffi::Bind(), on a GPU with the stream.
template <typename Binding>
auto BindEncode(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()          // index_keys
      .template Arg<ffi::Buffer<ffi::S32>>()   // rows
      .template Arg<ffi::Buffer<ffi::F32>>()   // index_key
      .template Arg<ffi::Buffer<ffi::F32>>()   // record
      .template Arg<ffi::Buffer<ffi::F32>>()   // query
      .template Arg<ffi::Buffer<ffi::F32>>()   // weights
      .template Attr<int64_t>("latent")
      .template Ret<ffi::AnyBuffer>()          // index_keys
      .template Ret<ffi::AnyBuffer>()          // stored
      .template Ret<ffi::AnyBuffer>()          // codes
      .template Ret<ffi::Buffer<ffi::F32>>();  // scaled
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_ENCODE_H_
