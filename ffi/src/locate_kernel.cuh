// echo_locate as one kernel: where every selected record is, and the missing ones fetched. What it means stands in
// echo_jax/locate.py.
//
// A warp takes kEntries neighbours of one list, a lane each: position -> page -> row -> slot, three loads that need each
// other. Where a lane finds no slot, the whole warp copies its record, up to eight at a time, from staging or from the
// host, to the entry's own place among the fetched ones. No warp needs anything of another, so there is no barrier between
// blocks, no atomic and no scratch. The last warps copy the step's new records.
//
// What limits it: with few missing rows the chain of four latencies, of which the last crosses the link; with many the
// link. Few entries a warp and many rows at once keep the link busy where all rows of one seat are missing. Measured in
// bench/locate.py.
#ifndef ECHO_FFI_LOCATE_KERNEL_CUH_
#define ECHO_FFI_LOCATE_KERNEL_CUH_

#include <cstddef>
#include <cstdint>

#include "echo_ffi/locate.h"
#include "rows_kernel.cuh"

namespace echo_ffi {

inline constexpr int kLocateWarps = 8;  // of a block

// The rows that one warp moves, those of its first lanes.
struct WarpRows {
  Move moves[kLanes];
};

// A lane whose row is staged takes it from there. `wanting` has the lanes that fetch.
__device__ __forceinline__ void TakeStaged(const LocateViews& views, int32_t seat, unsigned wanting, int32_t row, int lane,
                                           Move* own) {
  constexpr int kChunks = 4;  // of 32 staged rows, under way together
  const int32_t* rows = views.staged_rows + static_cast<int64_t>(seat) * views.staging;
  for (int base = 0; base < views.staging && wanting != 0; base += kChunks * kLanes) {
    int32_t staged[kChunks];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int at = base + chunk * kLanes + lane;
      staged[chunk] = at < views.staging ? rows[at] : -1;
    }
    for (unsigned rest = wanting; rest != 0; rest &= rest - 1) {
      const int fetching = __ffs(static_cast<int>(rest)) - 1;
      const int32_t wanted = __shfl_sync(kEveryLane, row, fetching);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const unsigned lanes = __ballot_sync(kEveryLane, staged[chunk] == wanted);
        if (lanes == 0 || !(wanting >> fetching & 1)) continue;
        const int64_t place = base + chunk * kLanes + __ffs(static_cast<int>(lanes)) - 1;
        if (lane == fetching) own->from = views.staged.at(static_cast<int64_t>(seat) * views.staging + place);
        wanting &= ~(1u << fetching);
      }
    }
  }
}

// Rows that a warp moves at once, and the loads of each lane for them.
template <typename Shape>
struct LocateShape {
  using Word = typename Shape::Word;
  static constexpr int kLoads = Shape::kLoads, kRows = Shape::kMerged, kRowsLoads = Shape::kMergedLoads;
};
template <>
struct LocateShape<ShapeOfShort> {
  using Word = uint4;
  static constexpr int kLoads = 2, kRows = 8, kRowsLoads = 11;  // 8 x 656 B
};
template <>
struct LocateShape<ShapeOfLong> {
  using Word = uint4;
  static constexpr int kLoads = 3, kRows = 4, kRowsLoads = 9;  // 4 x 1152 B
};

// Moves the rows of the lanes that have one.
template <typename Shape>
__device__ __forceinline__ void MoveOfWarp(Move own, unsigned lanes, int words, int lane, WarpRows* shared) {
  const int count = __popc(lanes);
  if (own.to != nullptr) shared->moves[__popc(lanes & ((1u << lane) - 1))] = own;
  __syncwarp();
  own = lane < count ? shared->moves[lane] : Move{};
  if (count == 1) {
    MoveGroup<ReadOnly, typename Shape::Word, 1, Shape::kLoads>(own, 0, words, lane);
    return;
  }
  for (int first = 0; first < count; first += Shape::kRows) {
    MoveGroup<ReadOnly, typename Shape::Word, Shape::kRows, Shape::kRowsLoads>(own, first, words, lane);
  }
}

// The number of warps that the lists need, and that the new records need.
struct LocateGrid {
  int per_list;  // warps of a list
  int64_t lists, all;

  ECHO_HOST_DEVICE LocateGrid(const LocateViews& views, int entries)
      : per_list((views.listed + entries - 1) / entries),
        lists(static_cast<int64_t>(views.lists()) * per_list),
        all(lists + views.lists()) {}
};

template <int kEntries, typename Shape>
__device__ __forceinline__ void LocateInWarp(const LocateViews& views, int words, int64_t warp, int lane,
                                             WarpRows* shared) {
  const LocateGrid grid(views, kEntries);
  if (warp >= grid.all) return;
  if (warp >= grid.lists) {
    const int64_t token = warp - grid.lists;
    const Move own{views.fresh.at(token), views.fetched.at(token)};
    MoveGroup<ReadOnly, typename Shape::Word, 1, Shape::kLoads>(own, 0, words, lane);
    return;
  }
  const int64_t layer = *views.layer;
  const bool has_layer = views.HasLayer(layer);
  const int32_t list = static_cast<int32_t>(warp / grid.per_list);
  const int32_t k = static_cast<int32_t>(warp % grid.per_list) * kEntries + lane;
  const bool is_listed = lane < kEntries && k < views.listed;
  const int64_t entry = static_cast<int64_t>(list) * views.listed + k;
  Located located;
  if (is_listed) {
    located = LocateEntry(views, has_layer ? views.slot_of + layer * views.pool.rows : nullptr, list, k,
                          views.positions[entry]);
    views.places[entry] = located.place;
  }
  const unsigned wanting = __ballot_sync(kEveryLane, located.is_fetched);
  if (wanting == 0) return;
  Move own{};
  if (located.is_fetched) {
    own = {has_layer ? views.pool.at(layer, located.row) : nullptr, views.fetched.at(views.lists() + entry)};
  }
  if (views.staging > 0) TakeStaged(views, list / views.tokens, wanting, located.row, lane, &own);
  MoveOfWarp<Shape>(own, wanting, words, lane, shared);
}

// With more list entries than this, 16 of them a warp instead of 8: the warps of 8 would no longer all be resident.
inline constexpr int64_t kMostEntriesByEight = 32768;

}  // namespace echo_ffi

#endif  // ECHO_FFI_LOCATE_KERNEL_CUH_
