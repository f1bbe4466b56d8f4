// A thread block cluster as the slot manager's kernels see it: its barrier, shared memory of its blocks, and the few
// block-wide sums they need. Knows sm_90; knows nothing of slots.
//
// The barrier is also the order of memory: what any thread of the cluster wrote before it, to shared or global memory, is
// seen by every thread after it, as long as the reader does not ask its own L1 for a line it read earlier. Hence __ldcg
// wherever another block may have written.
//
// With ECHO_EMULATE the same kernels compile for a CPU: tests/ffi/emulate/gpu.h then stands in for the GPU.
#ifndef ECHO_FFI_CLUSTER_CUH_
#define ECHO_FFI_CLUSTER_CUH_

#include <cstdint>

#ifdef ECHO_EMULATE
#include "gpu.h"
#endif

// A point of the slot manager's kernels that has a name. Nothing happens there, unless who includes this wants to know when
// each warp comes by, as bench/slots_phases.cu does.
#ifndef ECHO_PHASE
#define ECHO_PHASE(name)
#endif

namespace echo_ffi {

inline constexpr int kThreads = 1024;  // of a block
inline constexpr int kWarps = kThreads / 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

#ifndef ECHO_EMULATE
__device__ inline unsigned BlockOfCluster() { return __clusterRelativeBlockRank(); }
// The lanes of a warp come together.
__device__ inline void ClusterArrive() {
  __syncwarp();
  __cluster_barrier_arrive();
}
// The same where nothing that was written has to be seen by others: no write is waited for.
__device__ inline void ClusterArriveRelaxed() {
  __syncwarp();
  __cluster_barrier_arrive_relaxed();
}
__device__ inline void ClusterWait() {
  __syncwarp();
  __cluster_barrier_wait();
}

// The same variable of another block's shared memory.
template <typename T>
__device__ T* Remote(T* shared, unsigned block) {
  return static_cast<T*>(__cluster_map_shared_rank(shared, block));
}

__device__ inline std::byte* SharedMemory() {
  extern __shared__ uint4 echo_shared_memory[];
  return reinterpret_cast<std::byte*>(echo_shared_memory);
}

// `bytes` <= 16 of global memory, aligned to 16, on their way to shared memory; the rest of the 16 becomes 0. Past the L1.
__device__ inline void CopyAsync16(void* shared, const void* global, int bytes) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void FetchToL2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }
__device__ inline void WaitForCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif

__device__ inline void ClusterSync() {
  ClusterArrive();
  ClusterWait();
}

__device__ inline int Lane() { return threadIdx.x & 31; }
__device__ inline int Warp() { return threadIdx.x >> 5; }

__device__ inline int Bits(uint64_t value) { return 64 - __clzll(static_cast<long long>(value)); }

// The lowest of the lanes' keys.
__device__ inline uint64_t LowestOfWarp(uint64_t key) {
  const auto high = static_cast<unsigned>(key >> 32);
  const unsigned lowest = __reduce_min_sync(kAllLanes, high);
  const unsigned low = __reduce_min_sync(kAllLanes, high == lowest ? static_cast<unsigned>(key) : ~0u);
  return static_cast<uint64_t>(lowest) << 32 | low;
}

// The sum of the lanes up to and with this one.
__device__ inline int WarpInclusiveSum(int value) {
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(kAllLanes, value, step);
    if (Lane() >= step) value += below;
  }
  return value;
}

// What the warps before this one counted, and what all of them did; totals[kWarps] as written before a barrier.
struct Prefix {
  int before;
  int total;
};

__device__ inline Prefix PrefixOfWarps(const int* totals) {
  const int own = totals[Lane()];
  const int inclusive = WarpInclusiveSum(own);
  const int before = __shfl_sync(kAllLanes, inclusive - own, Warp());
  return {before, __shfl_sync(kAllLanes, inclusive, 31)};
}

// The sum of the threads before this one, and of all. Leaves totals[kWarps] in use until the next barrier.
__device__ inline Prefix BlockSum(int value, int* totals) {
  const int inclusive = WarpInclusiveSum(value);
  if (Lane() == 31) totals[Warp()] = inclusive;
  __syncthreads();
  const Prefix warps = PrefixOfWarps(totals);
  return {warps.before + inclusive - value, warps.total};
}

struct Range {
  uint64_t low;
  uint64_t high;
};

__device__ inline Range WarpRange(Range range) {
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t low = __shfl_xor_sync(kAllLanes, range.low, step);
    const uint64_t high = __shfl_xor_sync(kAllLanes, range.high, step);
    range.low = low < range.low ? low : range.low;
    range.high = high > range.high ? high : range.high;
  }
  return range;
}

// The lowest low and the highest high of the block. Leaves ranges[kWarps] in use until the next barrier.
__device__ inline Range BlockRange(Range range, Range* ranges) {
  range = WarpRange(range);
  if (Lane() == 0) ranges[Warp()] = range;
  __syncthreads();
  return WarpRange(ranges[Lane()]);
}

}  // namespace echo_ffi

#endif  // ECHO_FFI_CLUSTER_CUH_
