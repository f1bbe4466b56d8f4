// A GPU of one thread block cluster, on one CPU thread: enough of CUDA for the kernels of ffi/src that include
// cluster.cuh. Knows fibers and barriers; nothing of what runs on it.
//
// Every GPU thread is a fiber. A fiber runs until it waits for others: its warp (shuffles, votes), its block, its cluster.
// Warps and blocks run as far apart as barriers let them, in a drawn order, so a barrier that is missing tends to show. What a GPU leaves undefined ends the run
// with a message: a barrier that not all reach, and another block's shared memory asked for before that block is known to
// have started or after it ended. Memory itself is ordinary: what this cannot show is a stale cache line.
#ifndef ECHO_TESTS_EMULATE_GPU_H_
#define ECHO_TESTS_EMULATE_GPU_H_

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define __device__
#define __forceinline__ inline

using std::max;
using std::min;

struct alignas(16) int4 {
  int x, y, z, w;
};
struct uint4 {
  uint32_t x, y, z, w;
};

namespace emulate {

constexpr size_t kStackBytes = 64 * 1024;

struct Index {
  unsigned x;
};

// Threads that wait for each other; `generation` counts how often all had come.
struct Barrier {
  int expected = 0, arrived = 0;
  uint64_t generation = 0;

  void Arrive() {
    if (++arrived == expected) {
      arrived = 0;
      ++generation;
    }
  }
};

// The lanes of a mask, exchanging a value each.
struct Exchange {
  Barrier barrier;
  uint64_t given[32] = {}, seen[32] = {};
};

struct Fiber {
  ucontext_t context;  // where it starts
  jmp_buf place;       // where it goes on; unlike a context, changed without a call of the system
  std::unique_ptr<char[]> stack;
  Index index{};
  int block = 0;
  const Barrier* waits_for = nullptr;
  uint64_t generation = 0;  // of that barrier when this fiber came
  uint64_t cluster_generation = 0;
  bool has_started = false, has_met_cluster = false, is_done = false;
};

class Gpu {
 public:
  Gpu(int blocks, size_t shared_bytes, uint64_t seed, int block_threads = 1024)
      : block_threads_(block_threads), random_(seed), shared_(blocks), ended_(blocks, 0) {
    cluster_.expected = blocks * block_threads;
    block_barriers_.resize(blocks);
    for (auto& barrier : block_barriers_) barrier.expected = block_threads_;
    warps_.resize(blocks * block_threads_ / 32);
    for (auto& memory : shared_) {
      memory.resize(shared_bytes / 8 + 2);
      for (auto& word : memory) word = random_();  // shared memory starts as anything
    }
    fibers_.resize(blocks * block_threads_);
  }

  void Run(std::function<void()> kernel) {
    kernel_ = std::move(kernel);
    current_gpu = this;
    for (size_t i = 0; i < fibers_.size(); ++i) {
      Fiber& fiber = fibers_[i];
      fiber.block = static_cast<int>(i / block_threads_);
      fiber.index.x = static_cast<unsigned>(i % block_threads_);
      fiber.stack.reset(new char[kStackBytes]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, &Gpu::Enter, 0);
    }
    std::vector<size_t> blocks(shared_.size());
    std::iota(blocks.begin(), blocks.end(), 0);
    left_ = fibers_.size();
    while (left_ > 0) {
      bool has_moved = false;
      std::shuffle(blocks.begin(), blocks.end(), random_);
      for (const size_t block : blocks) has_moved |= RunBlock(block);
      if (!has_moved && !has_lingered_) throw std::runtime_error("threads wait for a barrier that not all of them reach");
      ++next_turn_.generation;
      has_lingered_ = false;
      lingers_ = random_();
    }
  }

  // A thread that has arrived, and does something before it waits, may be slower than those that wait already: in half of
  // the blocks, others each turn, it goes on when all blocks have had theirs.
  void Linger() {
    if (!(lingers_ >> running_->block % 64 & 1)) return;
    has_lingered_ = true;
    Wait(next_turn_, next_turn_.generation);
  }

  Fiber& running() { return *running_; }
  Barrier& cluster() { return cluster_; }
  Barrier& block_barrier() { return block_barriers_[running_->block]; }

  std::byte* shared(int block) {
    auto* memory = reinterpret_cast<std::byte*>(shared_[block].data());
    return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory) + 15) / 16 * 16);
  }

  void* SharedOf(const void* own, int block) {
    if (block != running_->block) {
      if (!running_->has_met_cluster) Fail("shared memory of a block that need not have started");
      if (ended_[block] == block_threads_) Fail("shared memory of a block that has ended");
    }
    return shared(block) + (static_cast<const std::byte*>(own) - shared(running_->block));
  }

  void Wait(const Barrier& barrier, uint64_t generation) {
    running_->waits_for = &barrier;
    running_->generation = generation;
    if (barrier.generation == generation) Leave();
  }

  void ArriveAndWait(Barrier& barrier) {
    const uint64_t generation = barrier.generation;
    barrier.Arrive();
    Wait(barrier, generation);
  }

  // Gives a value to the lanes of `mask`, all of which must call; returns theirs.
  const uint64_t* Trade(unsigned mask, uint64_t value) {
    const unsigned lane = running_->index.x % 32;
    if (!(mask >> lane & 1)) Fail("a lane outside the mask it gives");
    Exchange& exchange = warps_[running_->block * block_threads_ / 32 + running_->index.x / 32][mask];
    exchange.barrier.expected = __builtin_popcount(mask);
    exchange.given[lane] = value;
    if (exchange.barrier.arrived + 1 == exchange.barrier.expected) {
      std::memcpy(exchange.seen, exchange.given, sizeof(exchange.seen));
    }
    ArriveAndWait(exchange.barrier);
    return exchange.seen;
  }

  static inline thread_local Gpu* current_gpu = nullptr;

 private:
  static void Enter() {
    Gpu& gpu = *current_gpu;
    gpu.kernel_();
    gpu.running_->is_done = true;
    ++gpu.ended_[gpu.running_->block];
    _longjmp(gpu.scheduler_, 1);
  }

  // A warp runs until all its lanes wait, then another; until all warps wait. False where none could run.
  bool RunBlock(size_t block) {
    std::vector<size_t> warps(block_threads_ / 32);
    std::iota(warps.begin(), warps.end(), block * warps.size());
    bool has_moved = false;
    for (bool again = true; again;) {
      again = false;
      std::shuffle(warps.begin(), warps.end(), random_);
      for (const size_t warp : warps) {
        while (RunWarp(warp)) again = has_moved = true;
      }
    }
    return has_moved;
  }

  bool RunWarp(size_t warp) {
    bool has_moved = false;
    for (size_t i = warp * 32; i < warp * 32 + 32; ++i) {
      Fiber& fiber = fibers_[i];
      if (fiber.is_done || (fiber.waits_for != nullptr && fiber.waits_for->generation == fiber.generation)) continue;
      fiber.waits_for = nullptr;
      Resume(fiber);
      if (!error_.empty()) throw std::runtime_error(error_);
      left_ -= fiber.is_done;
      has_moved = true;
    }
    return has_moved;
  }

  [[gnu::noinline]] void Resume(Fiber& fiber) {
    running_ = &fiber;
    if (_setjmp(scheduler_) != 0) return;
    if (fiber.has_started) _longjmp(fiber.place, 1);
    fiber.has_started = true;
    setcontext(&fiber.context);
  }

  [[gnu::noinline]] void Leave() {
    if (_setjmp(running_->place) == 0) _longjmp(scheduler_, 1);
  }

  void Fail(const char* what) {
    error_ = what;
    Leave();
  }

  const int block_threads_;
  std::mt19937_64 random_;
  std::function<void()> kernel_;
  std::vector<std::vector<uint64_t>> shared_;
  std::vector<int> ended_;
  std::vector<Barrier> block_barriers_;
  std::vector<std::map<unsigned, Exchange>> warps_;
  std::vector<Fiber> fibers_;
  Barrier cluster_, next_turn_;
  uint64_t lingers_ = random_();  // a bit of each block
  bool has_lingered_ = false;
  jmp_buf scheduler_;
  Fiber* running_ = nullptr;
  size_t left_ = 0;
  std::string error_;
};

inline Gpu& Here() { return *Gpu::current_gpu; }

template <typename T>
uint64_t Pack(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}
template <typename T>
T Unpack(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace emulate

#define threadIdx (emulate::Here().running().index)

inline void __syncthreads() { emulate::Here().ArriveAndWait(emulate::Here().block_barrier()); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulate::Here().Trade(mask, 0); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulate::Unpack<T>(emulate::Here().Trade(mask, emulate::Pack(value))[lane & 31]);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulate::Unpack<T>(emulate::Here().Trade(mask, emulate::Pack(value))[lane < step ? lane : lane - step]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulate::Unpack<T>(emulate::Here().Trade(mask, emulate::Pack(value))[lane ^ step]);
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t* values = emulate::Here().Trade(mask, emulate::Pack(value));
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1 && values[lane] == emulate::Pack(value)) lanes |= 1u << lane;
  }
  return lanes;
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const uint64_t* votes = emulate::Here().Trade(mask, vote);
  unsigned lanes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) lanes |= (mask >> lane & 1 && votes[lane] ? 1u : 0u) << lane;
  return lanes;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
inline int __reduce_add_sync(unsigned mask, int value) {
  const uint64_t* values = emulate::Here().Trade(mask, emulate::Pack(value));
  int sum = 0;
  for (unsigned lane = 0; lane < 32; ++lane) sum += mask >> lane & 1 ? emulate::Unpack<int>(values[lane]) : 0;
  return sum;
}

inline unsigned __reduce_min_sync(unsigned mask, unsigned value) {
  const uint64_t* values = emulate::Here().Trade(mask, emulate::Pack(value));
  unsigned lowest = ~0u;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) lowest = std::min(lowest, emulate::Unpack<unsigned>(values[lane]));
  }
  return lowest;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) { return ~__reduce_min_sync(mask, ~value); }

inline void __threadfence() {}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(uint32_t bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline int __clzll(long long bits) { return bits == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(bits)); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}

template <typename T>
T atomicAdd(T* to, T value) {
  const T old = *to;
  *to = old + value;
  return old;
}
template <typename T>
T atomicMin(T* to, T value) {
  const T old = *to;
  *to = std::min(old, value);
  return old;
}
template <typename T>
T atomicMax(T* to, T value) {
  const T old = *to;
  *to = std::max(old, value);
  return old;
}
template <typename T>
T atomicCAS(T* to, T expected, T value) {
  const T old = *to;
  if (old == expected) *to = value;
  return old;
}
template <typename T>
T atomicOr(T* to, T value) {
  const T old = *to;
  *to = old | value;
  return old;
}

namespace echo_ffi {

inline unsigned BlockOfCluster() { return static_cast<unsigned>(emulate::Here().running().block); }
inline void ClusterArrive() {
  emulate::Here().running().cluster_generation = emulate::Here().cluster().generation;
  emulate::Here().cluster().Arrive();
  emulate::Here().Linger();
}
inline void ClusterArriveRelaxed() { ClusterArrive(); }
inline void ClusterWait() {
  emulate::Here().Wait(emulate::Here().cluster(), emulate::Here().running().cluster_generation);
  emulate::Here().running().has_met_cluster = true;
}
template <typename T>
T* Remote(T* shared, unsigned block) {
  return static_cast<T*>(emulate::Here().SharedOf(shared, static_cast<int>(block)));
}
inline std::byte* SharedMemory() { return emulate::Here().shared(static_cast<int>(BlockOfCluster())); }
inline void CopyAsync16(void* shared, const void* global, int bytes) {
  std::memset(shared, 0, 16);
  std::memcpy(shared, global, static_cast<size_t>(bytes));
}
inline void FetchToL2(const void*) {}
inline void WaitForCopies() {}

}  // namespace echo_ffi

#endif  // ECHO_TESTS_EMULATE_GPU_H_
