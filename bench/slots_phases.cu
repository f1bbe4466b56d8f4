// The slot manager's kernels with a clock at each of their named points, and small kernels that cost what one part of them
// costs, for bench/slots_phases.py: compiled and registered there on the spot. Bench only.
//
// A warp's stamps are kept in shared memory until its last point, so that no barrier waits for them. They are cycles of the
// SM's own clock, which other SMs do not share.
#include <cuda_runtime.h>

#include <cstdint>

// In the order in which a thread meets them.
#define ECHO_PHASES(use)                                                                                                \
  use(Begin) use(Cleared) use(Looked) use(AllLooked) use(Found) use(SeenRead) use(Shared) use(Ranked) use(AllShared)     \
      use(Collected) use(AllTold) use(Chosen) use(AllChosen) use(Selected) use(Finished) use(End)

namespace echo_phases {

#define ECHO_NAME_PHASE(name) k##name,
enum Phase : int { ECHO_PHASES(ECHO_NAME_PHASE) kPhases };
#undef ECHO_NAME_PHASE

constexpr int kWarps = 32, kMostBlocks = 16;
__device__ uint32_t stamps_of_launch[kMostBlocks][kWarps][kPhases];  // 0 where a warp did not come by

__device__ inline void Stamp(Phase phase) {
  __shared__ uint32_t stamps[kWarps][kPhases];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  static_assert(kPhases <= 32, "a lane for each");
  if (phase == kBegin && lane < kPhases) stamps[warp][lane] = 0;
  __syncwarp();
  if (lane == 0) {
    uint32_t now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    stamps[warp][phase] = now | 1;
  }
  __syncwarp();
  if (phase == kEnd && lane < kPhases) stamps_of_launch[blockIdx.x][warp][lane] = stamps[warp][lane];
}

}  // namespace echo_phases

#define ECHO_PHASE(name) ::echo_phases::Stamp(::echo_phases::k##name)

#include "../ffi/src/slots.cu"

namespace {

// ---- what a part costs by itself -----------------------------------------------------------------------------------------

namespace ffi = xla::ffi;

struct Costs {
  int32_t* words;         // scattered over
  const int32_t* places;  // different ones, in no order
  int32_t many;           // of each thread
  int32_t blocks;
};

// Which part: the number is an attribute of the target.
enum Part : int { kNothing, kBarriers, kLoads, kStores, kMarks, kMarksOfTwo, kAtomics, kGridMeets, kCode, kParts };

__device__ unsigned arrived = 0;  // blocks that came, over all launches

__device__ inline void MeetInGrid(unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned turn = atomicAdd(&arrived, 1) / blocks;
    while (*static_cast<volatile unsigned*>(&arrived) / blocks == turn) {
    }
    __threadfence();
  }
  __syncthreads();
}

// 2,048 instructions one after the other, of which each needs the fourth before it.
__device__ inline uint32_t GoStraightOn(uint32_t by) {
  uint32_t a = by, b = by + 1, c = by + 2, d = by + 3;
#pragma unroll
  for (int i = 0; i < 512; ++i) {
    asm volatile(
        "mad.lo.u32 %0, %0, %4, %1; mad.lo.u32 %1, %1, %4, %2; mad.lo.u32 %2, %2, %4, %3; mad.lo.u32 %3, %3, %4, %0;"
        : "+r"(a), "+r"(b), "+r"(c), "+r"(d)
        : "r"(by));
  }
  return a ^ b ^ c ^ d;
}

template <Part kPart, int kBlocks>
__device__ void PayFor(const Costs& costs) {
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  if constexpr (kPart == kBarriers) {
    for (int i = 0; i < costs.many; ++i) echo_ffi::ClusterSync();
  } else if constexpr (kPart == kGridMeets) {
    for (int i = 0; i < costs.many; ++i) MeetInGrid(gridDim.x);
  } else if constexpr (kPart == kCode) {
    uint32_t sum = threadIdx.x;
#pragma unroll 1
    for (int i = 0; i < costs.many; ++i) sum = GoStraightOn(sum);
    if (sum == 0x10001) costs.words[0] = 1;
  } else if constexpr (kPart == kLoads || kPart == kStores || kPart == kAtomics) {
    int32_t sum = 0;
    for (int i = 0; i < costs.many; ++i) {
      const int32_t place = costs.places[i * threads + thread];
      if constexpr (kPart == kLoads) {
        sum += __ldcg(costs.words + place);
      } else if constexpr (kPart == kStores) {
        costs.words[place] = i;
      } else {
        atomicMax(costs.words + place, i);
      }
    }
    if (sum == INT32_MAX) costs.words[0] = sum;
  } else if constexpr (kPart == kMarks || kPart == kMarksOfTwo) {
    auto* marks = reinterpret_cast<uint32_t*>(echo_ffi::SharedMemory());
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) marks[i] = 0;
    echo_ffi::ClusterSync();
    unsigned was_marked = 0;
    for (int i = 0; i < costs.many; ++i) {
      const auto place = static_cast<uint32_t>(costs.places[i * threads + thread]);
      const uint32_t bit = 1u << (place & 31);
      uint32_t* mark = echo_ffi::Remote(&marks[place >> 5 & 1023], (place >> 15) % kBlocks);
      if constexpr (kPart == kMarks) {
        was_marked |= atomicOr(mark, bit) & bit;
      } else {
        atomicOr(mark, bit);  // nobody asks what it was
      }
    }
    if (was_marked == 0x10001) costs.words[0] = 1;
    echo_ffi::ClusterSync();
  }
}

template <Part kPart, int kBlocks>
__global__ void __launch_bounds__(1024, 1) CostKernel(const Costs costs) {
  PayFor<kPart, kBlocks>(costs);
}

template <int kBlocks, int kPart = 0>
cudaError_t LaunchCost(int part, const Costs& costs, int threads, int64_t shared_bytes, bool is_cluster,
                       cudaStream_t stream) {
  if constexpr (kPart == kParts) {
    return cudaErrorInvalidValue;
  } else {
    if (part != kPart) return LaunchCost<kBlocks, kPart + 1>(part, costs, threads, shared_bytes, is_cluster, stream);
    const auto kernel = CostKernel<static_cast<Part>(kPart), kBlocks>;
    const cudaError_t error = echo_ffi::Allow(kernel, is_cluster ? kBlocks : 1, shared_bytes);
    if (error != cudaSuccess) return error;
    echo_ffi::OneCluster shape(kBlocks, shared_bytes, stream);
    shape.config.gridDim = dim3(static_cast<unsigned>(costs.blocks));
    shape.config.blockDim = dim3(static_cast<unsigned>(threads));
    if (!is_cluster) shape.config.numAttrs = 0;
    return cudaLaunchKernelEx(&shape.config, kernel, costs);
  }
}

ffi::Error Cost(cudaStream_t stream, echo_ffi::Numbers words, echo_ffi::Numbers places, ffi::Result<echo_ffi::Numbers>,
                int64_t part, int64_t blocks, int64_t threads, int64_t many, int64_t shared_bytes, bool is_cluster) {
  const Costs costs{words.typed_data(), places.typed_data(), static_cast<int32_t>(many), static_cast<int32_t>(blocks)};
  const bool has_places = part != kNothing && part != kBarriers && part != kGridMeets && part != kCode;
  if (has_places && many * blocks * threads > static_cast<int64_t>(places.element_count())) {
    return ffi::Error::InvalidArgument("there are fewer places than threads want");
  }
  const auto launch = blocks == 8 ? LaunchCost<8> : LaunchCost<16>;
  const cudaError_t error =
      launch(static_cast<int>(part), costs, static_cast<int>(threads), shared_bytes, is_cluster, stream);
  return error == cudaSuccess ? echo_ffi::Launched("bench_slots_cost") : ffi::Error::Internal(cudaGetErrorString(error));
}

// Runs for `cycles` of the SM's clock; how many nanoseconds that took.
__global__ void RateKernel(long long cycles, unsigned long long* nanoseconds) {
  unsigned long long from, to;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from)::"memory");
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(to)::"memory");
  *nanoseconds = to - from;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SlotsCostCuda, Cost,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<echo_ffi::Numbers>()
                                  .Arg<echo_ffi::Numbers>()
                                  .Ret<echo_ffi::Numbers>()
                                  .Attr<int64_t>("part")
                                  .Attr<int64_t>("blocks")
                                  .Attr<int64_t>("threads")
                                  .Attr<int64_t>("many")
                                  .Attr<int64_t>("shared_bytes")
                                  .Attr<bool>("is_cluster"));

extern "C" {

#define ECHO_NAME_PHASE(name) #name " "
const char* BenchPhaseNames() { return ECHO_PHASES(ECHO_NAME_PHASE); }
#undef ECHO_NAME_PHASE

// Copies the stamps of the last launch; `bytes` is the size of u32[16 blocks, 32 warps, phases].
int BenchPhaseStamps(uint32_t* to, int64_t bytes) {
  if (bytes != static_cast<int64_t>(sizeof(echo_phases::stamps_of_launch))) return -1;
  return cudaMemcpyFromSymbol(to, echo_phases::stamps_of_launch, sizeof(echo_phases::stamps_of_launch));
}

// Cycles of an SM's clock in a microsecond, now; negative where that cannot be found out.
double BenchCyclesOfMicrosecond() {
  unsigned long long nanoseconds = 0, *on_device = nullptr;
  constexpr long long kCycles = 4'000'000;
  if (cudaMalloc(&on_device, sizeof(nanoseconds)) != cudaSuccess) return -1;
  RateKernel<<<1, 1>>>(kCycles, on_device);
  const cudaError_t error = cudaMemcpy(&nanoseconds, on_device, sizeof(nanoseconds), cudaMemcpyDeviceToHost);
  cudaFree(on_device);
  return error == cudaSuccess && nanoseconds > 0 ? 1e3 * static_cast<double>(kCycles) / nanoseconds : -1;
}

}  // extern "C"
