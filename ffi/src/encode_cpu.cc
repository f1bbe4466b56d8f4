// echo_encode on a CPU: one thread, a job after the other.
#include <cstddef>
#include <cstdint>

#include "echo_ffi/encode.h"
#include "on_cpu.h"

namespace echo_ffi {
namespace {

struct OneThread {
  int64_t lane = 0, lanes = 1;

  Four Read(const float* values) const { return {{values[0], values[1], values[2], values[3]}}; }
  uint32_t Largest(uint32_t largest) const { return largest; }
};

ffi::Error Encode(ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> key,
                  ffi::Buffer<ffi::F32> record, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> weights,
                  int64_t latent, ffi::Result<ffi::AnyBuffer> pages_after, ffi::Result<ffi::AnyBuffer> stored,
                  ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::Buffer<ffi::F32>> scaled) {
  EncodeViews views;
  ECHO_RETURN_IF_ERROR(ViewEncode(pages, rows, key, record, query, weights, latent, pages_after, stored, codes, scaled,
                                  &views));
  const ffi::Span<const int32_t> listed(views.rows, static_cast<size_t>(views.tokens));
  ECHO_RETURN_IF_ERROR(CheckRange(kEncode, "rows", listed, "index_keys", views.host_rows));
  for (int64_t job = 0; job < views.jobs(); ++job) DoJob(OneThread{}, views, job);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoEncodeCpu, Encode, BindEncode(ffi::Ffi::Bind()));

}  // namespace echo_ffi
