// The handler of echo_top_k on a GPU: one launch. How it selects: top_k_kernel.cuh.
#include <cstdint>

#include "echo_ffi/launch.cuh"
#include "echo_ffi/top_k.h"
#include "top_k_kernel.cuh"

namespace echo_ffi::top_k {
namespace {

// Blocks that may run at once (an H200 has 132 multiprocessors, and a block needs one for itself), and what is not
// worth dividing further. Static, so that a captured launch fits every length.
constexpr int64_t kBlocks = 132;
constexpr int64_t kPositionsWorthABlock = 8192;
constexpr int64_t kMaxBlocksPerRow = 8;  // clusters of more are not portable

int64_t BlocksPerRow(int64_t rows, int64_t length) {
  int64_t blocks = 1;
  while (2 * blocks <= kMaxBlocksPerRow && 2 * blocks * rows <= kBlocks &&
         2 * blocks * kPositionsWorthABlock <= length) {
    blocks *= 2;
  }
  return blocks;
}

template <typename Bits>
__global__ void __launch_bounds__(kThreads, 1)
    TopKKernel(const Bits* __restrict__ score, const int32_t* __restrict__ visible, int64_t length, uint32_t k,
               uint32_t blocks, int32_t* __restrict__ positions, uint32_t* __restrict__ kth_bits) {
  const int64_t row = blockIdx.x / blocks;
  const int64_t seen = min(max(static_cast<int64_t>(visible[row]), static_cast<int64_t>(0)), length);
  auto& shared = *reinterpret_cast<Shared*>(SharedMemory());
  SelectFromRow(shared, score + row * length, static_cast<uint32_t>(seen), k, blocks, positions + row * k,
                kth_bits + row);
}

template <typename Bits>
cudaError_t Launch(cudaStream_t stream, const TopKViews& views) {
  const auto kernel = TopKKernel<Bits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  const int64_t blocks = BlocksPerRow(views.rows, views.length);
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(views.rows * blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<const Bits*>(views.score), views.visible, views.length,
                            static_cast<uint32_t>(views.k), static_cast<uint32_t>(blocks), views.positions,
                            reinterpret_cast<uint32_t*>(views.kth_score));
}

ffi::Error TopK(cudaStream_t stream, ffi::AnyBuffer score, ffi::Buffer<ffi::S32> visible,
                ffi::Result<ffi::Buffer<ffi::S32>> positions, ffi::Result<ffi::Buffer<ffi::F32>> kth_score, int64_t k) {
  constexpr const char* kTarget = "echo_top_k";
  TopKViews views;
  ECHO_RETURN_IF_ERROR(ViewTopK(kTarget, score, visible, k, positions, kth_score, &views));
  if (k > kMaxTopK) {
    return Refuse(kTarget, ": k is ", k, " but a GPU selects at most ", kMaxTopK, "; use the implementation 'jnp'");
  }
  if (views.rows == 0) return ffi::Error::Success();
  // An error of either call is the last error, too.
  static_cast<void>(views.is_bf16 ? Launch<uint16_t>(stream, views) : Launch<uint32_t>(stream, views));
  return Launched(kTarget);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoTopKCuda, TopK,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::AnyBuffer>()         // score
                                  .Arg<ffi::Buffer<ffi::S32>>()  // visible
                                  .Ret<ffi::Buffer<ffi::S32>>()  // positions
                                  .Ret<ffi::Buffer<ffi::F32>>()  // kth_score
                                  .Attr<int64_t>("k"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace echo_ffi::top_k
