// A gather of records from pinned host memory on one stream, timed while another kernel keeps the other multiprocessors
// busy. Plain CUDA, without XLA: bench/link_beside.py compiles it, makes the lists and says what the numbers mean.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kRecord = 656;  // bytes
constexpr int kGatherBlocks = 16, kBesideBlocks = 100, kThreads = 1024;
constexpr long kBefore = 200'000, kBeside = 1'500'000;  // ns: the other kernel runs before the gather, and throughout it
constexpr int64_t kSweptBytes = 240ll << 20, kDeviceBytes = 1ll << 30, kPage = 8192;

enum Beside { kNothing, kArithmetic, kL2, kDeviceMemory };

__device__ long Now() {
  long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ uint4 Load(const uint4* from) {
  uint4 found;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "l"(from));
  return found;
}

// A warp a record; every block has an even, contiguous share of the list.
__global__ void __launch_bounds__(kThreads, 1) Gather(const char* pool, const int* rows, int count, char* out) {
  const int lane = threadIdx.x % 32, second = lane + 32;
  const int first = static_cast<int64_t>(count) * blockIdx.x / gridDim.x;
  const int end = static_cast<int64_t>(count) * (blockIdx.x + 1) / gridDim.x;
  for (int entry = first + threadIdx.x / 32; entry < end; entry += kThreads / 32) {
    const uint4* from = reinterpret_cast<const uint4*>(pool + static_cast<int64_t>(rows[entry]) * kRecord);
    uint4* to = reinterpret_cast<uint4*>(out + static_cast<int64_t>(entry) * kRecord);
    const bool has_second = second < kRecord / 16;
    const uint4 low = Load(from + lane), high = has_second ? Load(from + second) : uint4{};
    to[lane] = low;
    if (has_second) to[second] = high;
  }
}

// Until `ns` have passed: arithmetic, or pages of 8 KiB anywhere in `bytes`, a warp a page.
__global__ void __launch_bounds__(kThreads, 1) KeepBusy(const uint4* data, int64_t bytes, long ns, unsigned* sink) {
  const long begin = Now();
  unsigned random = blockIdx.x * 7919 + threadIdx.x / 32 * 104729 + 12345, sum = 0;
  float product = threadIdx.x;
  while (Now() - begin < ns) {
    if (bytes == 0) {
#pragma unroll
      for (int step = 0; step < 512; ++step) product = product * 1.0001f + 0.5f;
      continue;
    }
    random = random * 1664525u + 1013904223u;
    const uint4* page = data + (random >> 4) % (bytes / kPage) * (kPage / 16) + threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < 16; ++step) sum ^= Load(page + 32 * step).x;
  }
  if (sum == 0x12345 || product == 1.0f) *sink = sum;
}

struct Held {
  char *pool = nullptr, *out = nullptr;
  uint4 *device = nullptr, *swept = nullptr;
  int* rows = nullptr;
  unsigned* sink = nullptr;
  cudaStream_t gathering = nullptr, beside = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  int64_t region = 0;
} held;

}  // namespace

// Pools for `layers` regions of `region_rows` records, and lists of `most` rows. Returns a CUDA error or 0.
extern "C" int Prepare(int layers, int region_rows, int most) {
  held.region = static_cast<int64_t>(region_rows) * kRecord;
  cudaError_t error = cudaHostAlloc(&held.pool, held.region * layers, cudaHostAllocDefault);
  const auto also = [&](cudaError_t next) { error = error == cudaSuccess ? next : error; };
  also(cudaMalloc(&held.out, static_cast<int64_t>(most) * kRecord));
  also(cudaMalloc(&held.device, kDeviceBytes));
  also(cudaMalloc(&held.swept, kSweptBytes));
  also(cudaMalloc(&held.rows, sizeof(int) * most));
  also(cudaMalloc(&held.sink, sizeof(unsigned)));
  also(cudaStreamCreate(&held.gathering));
  also(cudaStreamCreate(&held.beside));
  also(cudaEventCreate(&held.begin));
  also(cudaEventCreate(&held.end));
  return error;
}

// Microseconds of one gather of `count` rows from a layer's region into `us`. Returns a CUDA error or 0.
extern "C" int Time(const int* rows, int count, int layer, int beside, float* us) {
  cudaMemcpy(held.rows, rows, sizeof(int) * count, cudaMemcpyHostToDevice);
  cudaMemsetAsync(held.swept, 1, kSweptBytes, held.gathering);
  cudaStreamSynchronize(held.gathering);
  if (beside != kNothing) {
    const int64_t bytes = beside == kArithmetic ? 0 : beside == kL2 ? 16ll << 20 : kDeviceBytes;
    KeepBusy<<<kBesideBlocks, kThreads, 0, held.beside>>>(held.device, bytes, kBeside, held.sink);
    KeepBusy<<<1, 32, 0, held.gathering>>>(held.device, 0, kBefore, held.sink);
  }
  cudaEventRecord(held.begin, held.gathering);
  Gather<<<kGatherBlocks, kThreads, 0, held.gathering>>>(held.pool + held.region * layer, held.rows, count, held.out);
  cudaEventRecord(held.end, held.gathering);
  cudaDeviceSynchronize();
  cudaEventElapsedTime(us, held.begin, held.end);
  *us *= 1e3f;
  return cudaGetLastError();
}
