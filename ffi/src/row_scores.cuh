// One row's visible scores as a block of threads reads them: 16 bytes a load, wherever the row begins and ends, and
// never a byte outside it. Knows addresses and keys; not what is looked for.
//
// Place: the number of a score counted from the 16-byte boundary at or before the row's first score. Position = place -
// begin. A vector is 16 bytes of scores; a segment is a run of vectors.
#ifndef ECHO_FFI_ROW_SCORES_CUH_
#define ECHO_FFI_ROW_SCORES_CUH_

#include <cstdint>

#include "cluster.cuh"
#include "echo_ffi/order.h"

namespace echo_ffi::top_k {

constexpr uint32_t kThreads = echo_ffi::kThreads;
constexpr uint32_t kBatch = 16;  // scores a thread holds at once, one bit each in a mask

struct Vector {
  uint32_t words[4];
};

struct Segment {
  uint32_t first;  // vector
  uint32_t last;   // vector behind the end
};

template <typename Bits>  // uint32_t: float32, uint16_t: bfloat16
class Row {
 public:
  static constexpr uint32_t kPerVector = 16 / sizeof(Bits);
  static constexpr uint32_t kVectors = kBatch / kPerVector;

  __device__ Row(const Bits* scores, uint32_t visible) {
    const uint32_t ahead = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(scores) % 16 / sizeof(Bits));
    scores_ = scores - ahead;
    begin_ = ahead;
    end_ = ahead + visible;
  }

  __device__ uint32_t Begin() const { return begin_; }

  // Part `part` of so many, as equal as whole vectors allow.
  __device__ Segment Part(uint32_t part, uint32_t parts) const {
    const uint32_t vectors = (end_ + kPerVector - 1) / kPerVector;
    const uint32_t each = (vectors + parts - 1) / parts;
    return {min(part * each, vectors), min((part + 1) * each, vectors)};
  }

  __device__ uint32_t KeyAt(uint32_t position) const { return OrderKey(__ldg(scores_ + begin_ + position)); }

  // The L2 fetches the segment while the bracket is being found.
  __device__ void Prefetch(Segment segment) const {
    constexpr uint32_t kLine = 128 / 16;
    for (uint32_t vector = segment.first + threadIdx.x * kLine; vector < segment.last; vector += kThreads * kLine) {
      FetchToL2(At(vector));
    }
  }

  // body(keys[kBatch], visible, vector) for each batch; bit e of `visible` says whether keys[e] is a visible score, and
  // PlaceIn(vector, e) where it lies. All threads of the block take part in every call, so that a warp may vote.
  template <typename Body>
  __device__ void ForEachBatch(Segment segment, Body body) const {
    for (uint32_t base = segment.first; base < segment.last; base += kThreads * kVectors) {
      const uint32_t vector = base + threadIdx.x;
      const uint32_t stop = base + kThreads * kVectors;
      Vector raw[kVectors];
      uint32_t visible = 0;
      if (base * kPerVector >= begin_ && stop * kPerVector <= end_ && stop <= segment.last) {
#pragma unroll
        for (uint32_t j = 0; j < kVectors; ++j) raw[j] = Load(vector + j * kThreads);
        visible = (1u << kBatch) - 1;
      } else {
#pragma unroll
        for (uint32_t j = 0; j < kVectors; ++j) {
          visible |= LoadVisible(vector + j * kThreads, segment.last, &raw[j]) << (j * kPerVector);
        }
      }
      uint32_t keys[kBatch];
#pragma unroll
      for (uint32_t e = 0; e < kBatch; ++e) keys[e] = OrderKey(Score(raw[e / kPerVector], e % kPerVector));
      body(keys, visible, vector);
    }
  }

  static __device__ constexpr uint32_t PlaceIn(uint32_t vector, uint32_t e) {
    return (vector + e / kPerVector * kThreads) * kPerVector + e % kPerVector;
  }

 private:
  __device__ const Vector* At(uint32_t vector) const { return reinterpret_cast<const Vector*>(scores_) + vector; }

  __device__ Vector Load(uint32_t vector) const {
    const uint4 loaded = __ldg(reinterpret_cast<const uint4*>(At(vector)));
    return {{loaded.x, loaded.y, loaded.z, loaded.w}};
  }

  // A vector that may reach over an end of the row, and the mask of what in it is visible.
  __device__ uint32_t LoadVisible(uint32_t vector, uint32_t last, Vector* raw) const {
    const uint32_t place = vector * kPerVector;
    *raw = {};
    if (vector >= last) return 0;
    if (place >= begin_ && place + kPerVector <= end_) {
      *raw = Load(vector);
      return (1u << kPerVector) - 1;
    }
    uint32_t visible = 0;
#pragma unroll
    for (uint32_t e = 0; e < kPerVector; ++e) {
      if (place + e < begin_ || place + e >= end_) continue;
      constexpr uint32_t kPerWord = 4 / sizeof(Bits);
      raw->words[e / kPerWord] |= static_cast<uint32_t>(__ldg(scores_ + place + e)) << (e % kPerWord * 16);
      visible |= 1u << e;
    }
    return visible;
  }

  // The e-th score of a vector as the bits of a float32.
  static __device__ uint32_t Score(const Vector& raw, uint32_t e) {
    if constexpr (sizeof(Bits) == 4) {
      return raw.words[e];
    } else {
      return e % 2 ? raw.words[e / 2] & 0xffff0000u : raw.words[e / 2] << 16;
    }
  }

  const Bits* scores_;  // at place 0
  uint32_t begin_;      // place of the first visible score
  uint32_t end_;        // place behind the last
};

}  // namespace echo_ffi::top_k

#endif  // ECHO_FFI_ROW_SCORES_CUH_
