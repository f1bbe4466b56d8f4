// The handlers of echo_top_k and echo_bounded_top_k on a GPU: one launch. How it selects: top_k_kernel.cuh.
#include <atomic>
#include <cstdint>

#include "echo_ffi/launch.cuh"
#include "echo_ffi/top_k.h"
#include "top_k_kernel.cuh"

namespace echo_ffi::top_k {
namespace {

// What is not worth dividing further.
constexpr int64_t kPositionsWorthABlock = 8192;
constexpr int kMaxBlocksPerRow = 8;  // clusters of more are not portable

template <typename Bits>
__global__ void __launch_bounds__(kThreads, 1)
    TopKKernel(const Bits* __restrict__ score, const int32_t* __restrict__ visible, const uint32_t* __restrict__ bound,
               const uint32_t* __restrict__ above, int64_t length, uint32_t k, uint32_t blocks,
               int32_t* __restrict__ positions, uint32_t* __restrict__ kth_bits) {
  const int64_t row = blockIdx.x / blocks;
  if (above != nullptr) FetchMarks(above + row * WordsOfMarks(length), WordsOfMarks(length));
  const int64_t seen = min(max(static_cast<int64_t>(visible[row]), static_cast<int64_t>(0)), length);
  const Hint hint = {bound == nullptr ? 0 : BoundKey(bound[row]),
                     above == nullptr ? nullptr : above + row * WordsOfMarks(length)};
  auto& shared = *reinterpret_cast<Shared*>(SharedMemory());
  SelectFromRow(shared, score + row * length, static_cast<uint32_t>(seen), k, hint, blocks, positions + row * k,
                kth_bits + row);
}

// A launch with clusters of so many blocks, `clusters` of them.
struct Launcher {
  Launcher(int blocks, int64_t clusters, cudaStream_t stream) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(static_cast<unsigned>(clusters * blocks));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(Shared);
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  Launcher(const Launcher&) = delete;

  cudaLaunchAttribute cluster = {};
  cudaLaunchConfig_t config = {};
};

// How many clusters of so many blocks run at once on the current device. A cluster lies in one part of the chip (a
// GPC), and parts have different numbers of multiprocessors, so it is fewer than a division says: 132 of them need not
// have room for 32 clusters of 4. Asked once for each device.
template <typename Bits>
int ClustersAtOnce(int blocks) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kMaxBlocksPerRow + 1];  // one more than the answer; 0 before it is asked for
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  std::atomic<int>& kept = known[device][blocks];
  if (kept.load(std::memory_order_relaxed) == 0) {
    int found = 0;
    const Launcher launcher(blocks, 1, nullptr);
    if (cudaOccupancyMaxActiveClusters(&found, TopKKernel<Bits>, &launcher.config) != cudaSuccess) {
      found = 0;
      static_cast<void>(cudaGetLastError());  // a size that does not fit is no error of the launch to come
    }
    kept.store(found + 1, std::memory_order_relaxed);
  }
  return kept.load(std::memory_order_relaxed) - 1;
}

// As many blocks for each row as let all rows run at once. Static, so that a captured launch fits every length.
template <typename Bits>
int BlocksPerRow(int64_t rows, int64_t length) {
  for (int blocks = kMaxBlocksPerRow; blocks > 1; --blocks) {
    if (blocks * kPositionsWorthABlock <= length && rows <= ClustersAtOnce<Bits>(blocks)) return blocks;
  }
  return 1;
}

template <typename Bits>
cudaError_t Launch(cudaStream_t stream, const TopKViews& views) {
  const auto kernel = TopKKernel<Bits>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(sizeof(Shared)));
  if (error != cudaSuccess) return error;
  const int blocks = BlocksPerRow<Bits>(views.rows, views.length);
  const Launcher launcher(blocks, views.rows, stream);
  return cudaLaunchKernelEx(&launcher.config, kernel, static_cast<const Bits*>(views.score), views.visible,
                            reinterpret_cast<const uint32_t*>(views.bound), views.above, views.length,
                            static_cast<uint32_t>(views.k), static_cast<uint32_t>(blocks), views.positions,
                            reinterpret_cast<uint32_t*>(views.kth_score));
}

ffi::Error Select(cudaStream_t stream, const char* target, const TopKViews& views) {
  if (views.k > kMaxTopK) {
    return Refuse(target, ": k is ", views.k, " but a GPU selects at most ", kMaxTopK,
                  "; use the implementation 'jnp'");
  }
  if (views.rows == 0) return ffi::Error::Success();
  // An error of either call is the last error, too.
  static_cast<void>(views.is_bf16 ? Launch<uint16_t>(stream, views) : Launch<uint32_t>(stream, views));
  return Launched(target);
}

ffi::Error TopK(cudaStream_t stream, ffi::AnyBuffer score, ffi::Buffer<ffi::S32> visible,
                ffi::Result<ffi::Buffer<ffi::S32>> positions, ffi::Result<ffi::Buffer<ffi::F32>> kth_score, int64_t k) {
  TopKViews views;
  ECHO_RETURN_IF_ERROR(ViewTopK(kTopK, score, visible, k, positions, kth_score, &views));
  return Select(stream, kTopK, views);
}

ffi::Error BoundedTopK(cudaStream_t stream, ffi::AnyBuffer score, ffi::Buffer<ffi::S32> visible,
                       ffi::Buffer<ffi::F32> bound, ffi::Buffer<ffi::U32> above,
                       ffi::Result<ffi::Buffer<ffi::S32>> positions, ffi::Result<ffi::Buffer<ffi::F32>> kth_score,
                       int64_t k) {
  TopKViews views;
  ECHO_RETURN_IF_ERROR(ViewTopK(kBoundedTopK, score, visible, k, positions, kth_score, &views));
  ECHO_RETURN_IF_ERROR(ViewBound(kBoundedTopK, bound, above, &views));
  return Select(stream, kBoundedTopK, views);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoTopKCuda, TopK, BindTopK(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoBoundedTopKCuda, BoundedTopK, BindBoundedTopK(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace echo_ffi::top_k
