// The one kernel behind all movements of rows. Knows jobs (from where, to where) and words; which rows are wanted is said
// by the four lists of jobs in rows_jobs.cuh.
//
// Its meaning:
//     for job in range(min(limit, length)):
//         from, to = jobs.At(job)
//         if to: to[:words] = from[:words] if from else zeros
//
// How it moves them. One warp takes a row, or several neighbours of the list at once; a lane issues all its 16-byte loads
// before its first store (a row of 656 B is two loads for a lane, four rows are six; 1152 B are three, two rows five).
// Several rows are read as one line of words, so that rows which are neighbours in memory, as the ascending lists of a
// decode step have them, are read by one instruction across the seam between them. Neighbouring warps take neighbouring
// jobs at the same time: rows of one memory page are then wanted by one SM at one moment.
//
// What limits it: the link to host memory (54 GB/s), and in pools of 4 GiB and more the address translations of the GPU,
// some 30 million rows a second whatever their size. Neither gets better with more SMs; a few are enough, and the rest
// belong to the kernels beside this one.
#ifndef ECHO_FFI_ROWS_KERNEL_CUH_
#define ECHO_FFI_ROWS_KERNEL_CUH_

#include <cstddef>
#include <cstdint>

#ifdef ECHO_EMULATE
#include "gpu.h"
#else
#include <cuda_runtime.h>
#endif

namespace echo_ffi {

inline constexpr int kLanes = 32;
inline constexpr unsigned kEveryLane = 0xffffffffu;
inline constexpr int kBlockThreads = 1024;
inline constexpr int kBlockWarps = kBlockThreads / kLanes;

// One row to move. Without `to` there is nothing to do; without `from` the row becomes zero.
struct Move {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
};

#ifndef ECHO_EMULATE
// Memory that no thread of this kernel writes may be read past the coherent caches; L1 is left to the kernels beside it.
struct ReadOnly {
  static __device__ uint4 Load(const uint4* at) {
    uint4 word;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
        : "l"(at));
    return word;
  }
  static __device__ uint32_t Load(const uint32_t* at) {
    uint32_t word;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(at));
    return word;
  }
};

// Memory that this kernel also writes, at other rows.
struct ReadWrite {
  template <typename Word>
  static __device__ Word Load(const Word* at) {
    return __ldcg(at);
  }
};

#endif  // ECHO_EMULATE

// Moves the rows of `kRows` lanes from `first_lane` on, kLoads words of each lane in flight.
template <typename Memory, typename Word, int kRows, int kLoads>
__device__ __forceinline__ void MoveGroup(Move own, int first_lane, int words, int lane) {
  const auto from_of = [&](int row) {
    return reinterpret_cast<const Word*>(
        __shfl_sync(kEveryLane, reinterpret_cast<unsigned long long>(own.from), first_lane + row));
  };
  const auto to_of = [&](int row) {
    return reinterpret_cast<Word*>(
        __shfl_sync(kEveryLane, reinterpret_cast<unsigned long long>(own.to), first_lane + row));
  };
  const auto row_of = [&](int place) {
    int row = 0;
#pragma unroll
    for (int next = 1; next < kRows; ++next) row += place >= next * words;
    return row;
  };
  const int total = kRows * words;
  for (int base = 0; base < total; base += kLoads * kLanes) {
    Word moved[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int place = base + load * kLanes + lane, row = row_of(place);
      const Word* from = from_of(row);
      moved[load] = Word{};
      if (place < total && from != nullptr) moved[load] = Memory::Load(from + (place - row * words));
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int place = base + load * kLanes + lane, row = row_of(place);
      Word* to = to_of(row);
      if (place < total && to != nullptr) to[place - row * words] = moved[load];
    }
  }
}

// All rows of this warp: groups of kRows neighbouring jobs, every `warps`-th group.
template <typename Jobs, typename Word, int kRows, int kLoads>
__device__ __forceinline__ void MoveRows(const Jobs& jobs, int64_t limit, int words, int64_t warp, int64_t warps,
                                         int lane) {
  constexpr int kGroups = kLanes / kRows;  // the lists are read for so many groups at once, one job a lane
  for (int64_t first = warp; first * kRows < limit; first += kGroups * warps) {
    const int64_t job = (first + lane / kRows * warps) * kRows + lane % kRows;
    const Move own = job < limit ? jobs.At(job) : Move{};
    for (int group = 0; group < kGroups && (first + group * warps) * kRows < limit; ++group) {
      MoveGroup<typename Jobs::Memory, Word, kRows, kLoads>(own, group * kRows, words, lane);
    }
  }
}

// Jobs has: Memory; length, how many jobs there can be; Limit(), how many there are, read on the device; At(job) for a
// job below length.
//
// As long as every row can have a warp of its own, it has: the first job of a warp is read beside the limit and not after
// it. Longer lists are moved kMerged rows at a time.
template <typename Jobs, typename Word, int kLoads, int kMerged, int kMergedLoads>
__device__ __forceinline__ void MoveAll(const Jobs& jobs, int words, int64_t block, int64_t blocks) {
  const int lane = threadIdx.x % kLanes;
  const int64_t warp = block * kBlockWarps + threadIdx.x / kLanes, warps = blocks * kBlockWarps;
  const Move first = warp < jobs.length ? jobs.At(warp) : Move{};
  const int64_t limit = jobs.Limit();
  if (limit > warps) {
    MoveRows<Jobs, Word, kMerged, kMergedLoads>(jobs, limit, words, warp, warps, lane);
  } else if (warp < limit) {
    MoveGroup<typename Jobs::Memory, Word, 1, kLoads>(first, 0, words, lane);
  }
}

// How a record is moved: in which words, and how many loads a lane has in flight for one row and for kMerged rows.
template <typename WordType, int kLoadsOfOne, int kRowsOfMany, int kLoadsOfMany>
struct Shape {
  using Word = WordType;
  static constexpr int kLoads = kLoadsOfOne, kMerged = kRowsOfMany, kMergedLoads = kLoadsOfMany;
};

using ShapeOfWords = Shape<uint32_t, 4, 2, 6>;
using ShapeOfShort = Shape<uint4, 2, 4, 6>;
using ShapeOfLong = Shape<uint4, 3, 2, 5>;  // nine loads for four rows of 1152 B would not fit the registers of a thread

inline constexpr int64_t kShortBytes = 2 * kLanes * 16;  // at most so many are two loads of a lane

// use(Shape) for records of so many bytes.
template <typename Use>
void WithShape(int64_t record_bytes, bool is_aligned, Use use) {
  if (!is_aligned || record_bytes % 16 != 0) {
    use(ShapeOfWords{});
  } else if (record_bytes <= kShortBytes) {
    use(ShapeOfShort{});
  } else {
    use(ShapeOfLong{});
  }
}

#ifndef ECHO_EMULATE
template <typename Jobs, typename Word, int kLoads, int kMerged, int kMergedLoads>
__global__ void __launch_bounds__(kBlockThreads) MoveRowsKernel(Jobs jobs, int words) {
  MoveAll<Jobs, Word, kLoads, kMerged, kMergedLoads>(jobs, words, blockIdx.x, gridDim.x);
}

// Blocks for lists of `length` rows of `record_bytes`: enough warps to keep the link busy, and no more (numbers: README.md).
inline unsigned Blocks(int64_t length, int64_t record_bytes) {
  const int64_t most = record_bytes >= 512 ? 16 : 32;
  const int64_t needed = (length + kBlockWarps - 1) / kBlockWarps;
  return static_cast<unsigned>(needed < 1 ? 1 : needed > most ? most : needed);
}

// Launches the kernel that fits the record. `is_aligned`: every address that a job can name is a multiple of 16.
template <typename Jobs>
void LaunchMove(const Jobs& jobs, int64_t record_bytes, bool is_aligned, unsigned blocks, cudaStream_t stream) {
  WithShape(record_bytes, is_aligned, [&](auto shape) {
    using Shape = decltype(shape);
    MoveRowsKernel<Jobs, typename Shape::Word, Shape::kLoads, Shape::kMerged, Shape::kMergedLoads>
        <<<blocks, kBlockThreads, 0, stream>>>(jobs, static_cast<int>(record_bytes / sizeof(typename Shape::Word)));
  });
}
#endif  // ECHO_EMULATE

}  // namespace echo_ffi

#endif  // ECHO_FFI_ROWS_KERNEL_CUH_
