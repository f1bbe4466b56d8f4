// Pinned host memory of this library's own, handed to JAX as a DLPack tensor: exactly as large as asked for, given back to
// the machine when the last array that uses it is gone. XLA's own pinned memory comes in powers of two, ends at a limit set
// before it starts, and is kept until the process ends.
//
// Knows the CUDA runtime and DLPack's C structures. The memory belongs to the tensor; whoever holds the tensor calls its
// deleter once (JAX does). The deleter is C++ on purpose: one written in Python is called after Python has gone.
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fill_zeros.cuh"

namespace {

// As DLPack 0.8 lays them out; the layout is an ABI shared by every array library.
struct DlDevice {
  int32_t type;
  int32_t index;
};
struct DlType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t rank;
  DlType type;
  int64_t* shape;
  int64_t* strides;  // null: row-major
  uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

constexpr int32_t kDlCudaHost = 3;

std::atomic<int64_t> held_bytes{0};
thread_local std::string last_error;

struct Pinned {
  DlManagedTensor managed;
  std::vector<int64_t> shape;
  int64_t bytes;
};

// Errors are of no use here: at the end of a process the driver may have gone first, and the memory with it.
void Free(DlManagedTensor* managed) {
  auto* pinned = static_cast<Pinned*>(managed->context);
  cudaFreeHost(managed->tensor.data);
  cudaGetLastError();
  held_bytes -= pinned->bytes;
  delete pinned;
}

cudaError_t Allocate(int64_t bytes, int device, void** data) {
  cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  error = cudaHostAlloc(data, static_cast<size_t>(bytes), cudaHostAllocPortable | cudaHostAllocMapped);
  if (error != cudaSuccess) return error;
  // Kernels are given the host's address, which must be the GPU's too.
  void* on_device = nullptr;
  error = cudaHostGetDevicePointer(&on_device, *data, 0);
  if (error == cudaSuccess && on_device != *data) error = cudaErrorNotSupported;
  if (error == cudaSuccess) {
    echo_ffi::LaunchFillZeros(*data, bytes, cudaStreamPerThread);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(cudaStreamPerThread);
  if (error != cudaSuccess) cudaFreeHost(*data);  // nothing stays pinned
  return error;
}

}  // namespace

extern "C" {

// A zeroed tensor in pinned host memory that GPU `device` reaches, or null: EchoPinnedError() says why. `code` and `bits`
// are DLPack's for the element type. The calling thread keeps its current device.
void* EchoPinnedCreate(const int64_t* shape, int32_t rank, int32_t code, int32_t bits, int32_t device) {
  int64_t bytes = bits / 8;
  for (int32_t i = 0; i < rank; ++i) bytes *= shape[i];
  int before = 0;
  const bool has_device = cudaGetDevice(&before) == cudaSuccess;
  void* data = nullptr;
  const cudaError_t error = Allocate(bytes, device, &data);
  cudaGetLastError();
  if (has_device) cudaSetDevice(before);
  if (error != cudaSuccess) {
    last_error = cudaGetErrorString(error);
    return nullptr;
  }
  auto* pinned = new Pinned{{}, std::vector<int64_t>(shape, shape + rank), bytes};
  pinned->managed = {{data,
                      {kDlCudaHost, device},
                      rank,
                      {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1},
                      pinned->shape.data(),
                      nullptr,
                      0},
                     pinned,
                     Free};
  held_bytes += bytes;
  return &pinned->managed;
}

// For a tensor that nobody took.
void EchoPinnedRelease(void* tensor) {
  auto* managed = static_cast<DlManagedTensor*>(tensor);
  managed->deleter(managed);
}

// Bytes of all tensors that are alive.
int64_t EchoPinnedBytes() { return held_bytes; }

// Why the last EchoPinnedCreate of this thread returned null.
const char* EchoPinnedError() { return last_error.c_str(); }

}  // extern "C"
