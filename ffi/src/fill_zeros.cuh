// Zeros, written by a few SMs to memory of any kind: host memory goes at the speed of the link whatever their number.
#ifndef ECHO_FFI_FILL_ZEROS_CUH_
#define ECHO_FFI_FILL_ZEROS_CUH_

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace echo_ffi {

inline constexpr int kFillThreads = 512;
inline constexpr unsigned kFillBlocks = 32;

template <typename Word>
__global__ void __launch_bounds__(kFillThreads) FillZerosKernel(Word* words, int64_t count) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
    words[i] = Word{};
  }
}

inline void LaunchFillZeros(void* data, int64_t bytes, cudaStream_t stream) {
  if (bytes % 16 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0) {
    FillZerosKernel<<<kFillBlocks, kFillThreads, 0, stream>>>(static_cast<uint4*>(data), bytes / 16);
  } else {
    FillZerosKernel<<<kFillBlocks, kFillThreads, 0, stream>>>(static_cast<unsigned char*>(data), bytes);
  }
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_FILL_ZEROS_CUH_
