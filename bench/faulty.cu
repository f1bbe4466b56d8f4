// A kernel with two faults on purpose: bench/sanitize.py shows with it that the sanitizers find what there is, on this machine
// and through the same filter of kernel names. It is a program of its own and no part of the library.
#include <cuda_runtime.h>

#include <cstdio>

namespace echo_ffi {

// Writes one word past the end of `words`, and reads what a neighbour in another warp writes without a barrier between.
__global__ void Faulty(int* words, int count) {
  __shared__ int shared[64];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  const int neighbour = shared[63 - threadIdx.x];
  if (static_cast<int>(threadIdx.x) <= count) words[threadIdx.x] = neighbour;
}

}  // namespace echo_ffi

int main() {
  int* words = nullptr;
  if (cudaMalloc(&words, 16 * sizeof(int)) != cudaSuccess) return 1;
  echo_ffi::Faulty<<<1, 64>>>(words, 16);
  // Whether it fails is the sanitizer's affair: it may stop the kernel, or only say what it saw.
  std::printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}
