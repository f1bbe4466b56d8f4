// echo_encode on a GPU: one launch, a warp a job. What a layer stores of a step is a megabyte at 32 seats, so the launch
// is what it costs; XLA makes six kernels of the same work, each waited for.
#include <cstdint>

#include "echo_ffi/encode.h"
#include "echo_ffi/launch.cuh"

namespace echo_ffi {
namespace {

constexpr int kLanes = 32;
constexpr int kWarps = 8;  // of a block

struct Warp {
  int64_t lane = 0, lanes = kLanes;

  // XLA's buffers lie on multiples of 16 bytes, and what is read at once starts at a multiple of four values.
  __device__ Four Read(const float* values) const {
    const float4 read = __ldg(reinterpret_cast<const float4*>(values));
    return {{read.x, read.y, read.z, read.w}};
  }
  __device__ uint32_t Largest(uint32_t largest) const { return __reduce_max_sync(0xffffffffu, largest); }
};

__global__ void __launch_bounds__(kLanes* kWarps) EncodeKernel(EncodeViews views) {
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  if (job < views.jobs()) DoJob(Warp{threadIdx.x % kLanes}, views, job);
}

ffi::Error Encode(cudaStream_t stream, ffi::AnyBuffer pages, ffi::Buffer<ffi::S32> rows, ffi::Buffer<ffi::F32> key,
                  ffi::Buffer<ffi::F32> record, ffi::Buffer<ffi::F32> query, ffi::Buffer<ffi::F32> weights,
                  int64_t latent, ffi::Result<ffi::AnyBuffer> pages_after, ffi::Result<ffi::AnyBuffer> stored,
                  ffi::Result<ffi::AnyBuffer> codes, ffi::Result<ffi::Buffer<ffi::F32>> scaled) {
  EncodeViews views;
  ECHO_RETURN_IF_ERROR(ViewEncode(pages, rows, key, record, query, weights, latent, pages_after, stored, codes, scaled,
                                  &views));
  // Nothing to do is launched too: a command buffer wants something to record.
  const int64_t blocks = (views.jobs() + kWarps - 1) / kWarps;
  EncodeKernel<<<static_cast<unsigned>(blocks < 1 ? 1 : blocks), kLanes * kWarps, 0, stream>>>(views);
  return Launched(kEncode);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoEncodeCuda, Encode, BindEncode(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace echo_ffi
