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
// Who moves them. Each block takes an even, contiguous share of the list, drops the jobs that move nothing, and gives each
// of its warps the same number of turns of nearly as many rows: no SM is left alone with a last round. Where many rows may
// come from device memory, helper blocks are launched besides: the first blocks then move what lies in host memory and
// the helpers the rest.
//
// What limits it: the link to host memory (54 GB/s), and in pools of 4 GiB and more the address translations of the GPU,
// some 30 million rows a second whatever their size. Neither gets better with more SMs; a few are enough, and the rest
// belong to the kernels beside this one.
#ifndef ECHO_FFI_ROWS_KERNEL_CUH_
#define ECHO_FFI_ROWS_KERNEL_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

// All rows of this warp: groups of kRows neighbouring jobs, every `warps`-th group. Needs no shared memory.
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
// it. Longer lists are moved kMerged rows at a time. For a kernel that has its shared memory for itself MoveEvenly is better.
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

// The rows that a block is about to move, in the order of the list.
struct ListedRows {
  Move moves[kBlockThreads];
  int count_of_warps[kBlockWarps];
};

// Lists the moves of all threads of the block that have somewhere to write to; returns how many, the same in all threads.
// The list before may still be read by others when a thread comes: it is overwritten once all have come.
__device__ __forceinline__ int ListRows(Move own, ListedRows* listed) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const unsigned lanes = __ballot_sync(kEveryLane, own.to != nullptr);
  if (lane == 0) listed->count_of_warps[warp] = __popc(lanes);
  __syncthreads();
  const int count = listed->count_of_warps[lane];
  const int before = __reduce_add_sync(kEveryLane, lane < warp ? count : 0);
  if (own.to != nullptr) listed->moves[before + __popc(lanes & ((1u << lane) - 1))] = own;
  const int total = __reduce_add_sync(kEveryLane, count);
  __syncthreads();
  return total;
}

// Moves listed rows by all warps of a block: in as few turns as kRows rows a warp allow, all turns alike.
template <typename Memory, typename Word, int kRows, int kLoads>
__device__ __forceinline__ void MoveListed(const ListedRows& listed, int count, int words) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int groups = (count + kBlockWarps * kRows - 1) / (kBlockWarps * kRows) * kBlockWarps;
  for (int group = warp; group < groups; group += kBlockWarps) {
    const int begin = group * count / groups, end = (group + 1) * count / groups;  // at most kRows
    if (begin == end) continue;
    const Move own = lane < end - begin ? listed.moves[begin + lane] : Move{};
    MoveGroup<Memory, Word, kRows, kLoads>(own, 0, words, lane);
  }
}

static_assert(kBlockWarps == kLanes, "a lane of each warp reads the count of one warp");

// Jobs as for MoveAll. Of all blocks, `movers` share the list evenly and the others, the helpers, share it again: with
// kIsHelped, movers take the jobs for which jobs.IsFar(move) and helpers those for which not. A list short enough for a
// warp of the movers for each row is theirs alone, as in MoveAll.
template <typename Jobs, typename Word, int kLoads, int kMerged, int kMergedLoads, bool kIsHelped>
__device__ __forceinline__ void MoveEvenly(const Jobs& jobs, int words, int64_t block, int64_t blocks, int64_t movers,
                                           ListedRows* listed) {
  const int lane = threadIdx.x % kLanes;
  const int64_t warp = block * kBlockWarps + threadIdx.x / kLanes, warps = movers * kBlockWarps;
  const Move first = warp < warps && warp < jobs.length ? jobs.At(warp) : Move{};
  const int64_t limit = jobs.Limit();
  if (limit <= warps) {
    if (warp < limit) MoveGroup<typename Jobs::Memory, Word, 1, kLoads>(first, 0, words, lane);
    return;
  }
  const bool is_helper = kIsHelped && block >= movers;
  const int64_t part = is_helper ? block - movers : block, parts = is_helper ? blocks - movers : movers;
  const int64_t begin = limit * part / parts;
  const int length = static_cast<int>(limit * (part + 1) / parts - begin);
  const int pieces = (length + kBlockThreads - 1) / kBlockThreads, size = pieces > 0 ? (length + pieces - 1) / pieces : 1;
  for (int done = 0; done < length; done += size) {
    const int place = threadIdx.x, end = length - done < size ? length - done : size;
    Move own = place < end ? jobs.At(begin + done + place) : Move{};
    if constexpr (kIsHelped) {
      if (jobs.IsFar(own) == is_helper) own = Move{};
    }
    const int count = ListRows(own, listed);
    MoveListed<typename Jobs::Memory, Word, kMerged, kMergedLoads>(*listed, count, words);
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

// The shape for jobs that read what they also write: with the loads of four rows in flight their registers would spill.
template <typename Jobs, typename Chosen>
using ShapeFor = std::conditional_t<std::is_same_v<typename Jobs::Memory, ReadWrite> && Chosen::kMerged == 4,
                                    Shape<typename Chosen::Word, Chosen::kLoads, 3, 4>, Chosen>;

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
  __shared__ ListedRows listed;
  MoveEvenly<Jobs, Word, kLoads, kMerged, kMergedLoads, false>(jobs, words, blockIdx.x, gridDim.x, gridDim.x, &listed);
}

template <typename Jobs, typename Word, int kLoads, int kMerged, int kMergedLoads>
__global__ void __launch_bounds__(kBlockThreads) MoveRowsHelpedKernel(Jobs jobs, int words, unsigned movers) {
  __shared__ ListedRows listed;
  MoveEvenly<Jobs, Word, kLoads, kMerged, kMergedLoads, true>(jobs, words, blockIdx.x, gridDim.x, movers, &listed);
}

// Blocks for lists of `length` rows of `record_bytes`: enough warps to keep the link busy, and no more (numbers: README.md).
inline unsigned Blocks(int64_t length, int64_t record_bytes) {
  const int64_t most = record_bytes >= 512 ? 16 : 32;
  const int64_t needed = (length + kBlockWarps - 1) / kBlockWarps;
  return static_cast<unsigned>(needed < 1 ? 1 : needed > most ? most : needed);
}

inline constexpr int64_t kMostHelpers = 64;  // with 32 movers still a block an SM

// Helpers beside `movers` blocks where `near_rows` may come from device memory: none that the movers' first turn can take.
inline unsigned Helpers(int64_t near_rows, unsigned movers) {
  if (near_rows <= static_cast<int64_t>(movers) * kBlockWarps) return 0;
  const int64_t needed = (near_rows + kBlockWarps - 1) / kBlockWarps;
  return static_cast<unsigned>(needed > kMostHelpers ? kMostHelpers : needed);
}

// Launches the kernel that fits the record. `is_aligned`: every address that a job can name is a multiple of 16.
template <typename Jobs>
void LaunchMove(const Jobs& jobs, int64_t record_bytes, bool is_aligned, unsigned blocks, cudaStream_t stream) {
  WithShape(record_bytes, is_aligned, [&](auto shape) {
    using Shape = ShapeFor<Jobs, decltype(shape)>;
    MoveRowsKernel<Jobs, typename Shape::Word, Shape::kLoads, Shape::kMerged, Shape::kMergedLoads>
        <<<blocks, kBlockThreads, 0, stream>>>(jobs, static_cast<int>(record_bytes / sizeof(typename Shape::Word)));
  });
}

// The same beside `helpers` blocks for rows that lie in device memory.
template <typename Jobs>
void LaunchHelpedMove(const Jobs& jobs, int64_t record_bytes, bool is_aligned, unsigned movers, unsigned helpers,
                      cudaStream_t stream) {
  WithShape(record_bytes, is_aligned, [&](auto shape) {
    using Shape = ShapeFor<Jobs, decltype(shape)>;
    MoveRowsHelpedKernel<Jobs, typename Shape::Word, Shape::kLoads, Shape::kMerged, Shape::kMergedLoads>
        <<<movers + helpers, kBlockThreads, 0, stream>>>(
            jobs, static_cast<int>(record_bytes / sizeof(typename Shape::Word)), movers);
  });
}
#endif  // ECHO_EMULATE

}  // namespace echo_ffi

#endif  // ECHO_FFI_ROWS_KERNEL_CUH_
