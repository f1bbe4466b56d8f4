// The kernel of ffi/src/top_k_kernel.cuh on the emulated GPU, for test_ffi_top_k.py to call. A read outside the visible
// scores of the row, or outside its marks, is an error here, where a GPU would often let it pass. Reads are counted.
#include <cstdint>
#include <cstring>
#include <exception>

#include "gpu.h"

namespace {
struct Readable {
  const void *from = nullptr, *to = nullptr;

  template <typename T>
  bool Has(const T* at) const {
    return at >= from && at + 1 <= to && reinterpret_cast<uintptr_t>(at) % sizeof(T) == 0;
  }
};
Readable scores_readable, marks_readable;
bool has_strayed = false;
int64_t score_reads = 0;
}  // namespace

template <typename T>
T __ldg(const T* from) {
  if (marks_readable.Has(from)) return *from;
  if (!scores_readable.Has(from)) {
    has_strayed = true;
    return T{};
  }
  ++score_reads;
  return *from;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline uint32_t __reduce_add_sync(unsigned mask, uint32_t value) {
  return static_cast<uint32_t>(__reduce_add_sync(mask, static_cast<int>(value)));
}

#include "top_k_kernel.cuh"

namespace {

template <typename Bits>
void Run(const void* score, uint32_t visible, uint32_t k, const uint32_t* bound, const uint32_t* above, uint32_t blocks,
         uint64_t seed, int32_t* positions, uint32_t* kth_bits) {
  using namespace echo_ffi::top_k;
  const auto* scores = static_cast<const Bits*>(score);
  scores_readable = {scores, scores + visible};
  marks_readable = {above, above == nullptr ? nullptr : above + (visible + 31) / 32};
  has_strayed = false;
  score_reads = 0;
  const Hint hint = {bound == nullptr ? 0 : echo_ffi::BoundKey(*bound), above};
  emulate::Gpu gpu(static_cast<int>(blocks), sizeof(Shared), seed);
  gpu.Run([&] {
    SelectFromRow(*reinterpret_cast<Shared*>(echo_ffi::SharedMemory()), scores, visible, k, hint, blocks, positions,
                  kth_bits);
  });
  if (has_strayed) throw std::runtime_error("the kernel reads outside the visible scores or the marks, or unaligned");
}

}  // namespace

// positions[k] and *kth_bits of one row of `visible` scores, and how many loads of scores it took. bound and above may
// be null. Writes what went wrong into error[200], or nothing.
extern "C" void EmulateTopK(const void* score, int is_bf16, uint32_t visible, uint32_t k, const uint32_t* bound,
                            const uint32_t* above, uint32_t blocks, uint64_t seed, int32_t* positions,
                            uint32_t* kth_bits, int64_t* reads, char* error) {
  try {
    (is_bf16 ? Run<uint16_t> : Run<uint32_t>)(score, visible, k, bound, above, blocks, seed, positions, kth_bits);
    *reads = score_reads;
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), 199);
  }
}
