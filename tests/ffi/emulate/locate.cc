// The kernel of ffi/src/locate_kernel.cuh on the emulated GPU, for test_ffi_locate_kernel.py to call. A record read outside
// what may be read, or one that is not aligned, is an error here, where a GPU would often let it pass.
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "gpu.h"

namespace {

std::vector<std::pair<const std::byte*, const std::byte*>> readable;
bool has_strayed = false;

}  // namespace

namespace echo_ffi {

struct ReadOnly {
  template <typename Word>
  static Word Load(const Word* at) {
    const auto* first = reinterpret_cast<const std::byte*>(at);
    for (const auto& [from, to] : readable) {
      if (first >= from && first + sizeof(Word) <= to && reinterpret_cast<uintptr_t>(at) % sizeof(Word) == 0) return *at;
    }
    has_strayed = true;
    return Word{};
  }
};
struct ReadWrite : ReadOnly {};

}  // namespace echo_ffi

#include "locate_kernel.cuh"

namespace {

using namespace echo_ffi;

template <int kEntries>
void Run(const LocateViews& views, bool is_aligned, uint64_t seed) {
  const int blocks = static_cast<int>((LocateGrid(views, kEntries).all + kLocateWarps - 1) / kLocateWarps);
  emulate::Gpu gpu(blocks, sizeof(WarpRows) * kLocateWarps, seed, kLanes * kLocateWarps);
  const int64_t bytes = views.pool.records.record_bytes;
  WithShape(bytes, is_aligned, [&](auto shape) {
    using Shape = LocateShape<decltype(shape)>;
    gpu.Run([&] {
      const int block = emulate::Here().running().block;
      const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
      auto* shared = reinterpret_cast<WarpRows*>(emulate::Here().shared(block)) + warp;
      LocateInWarp<kEntries, Shape>(views, static_cast<int>(bytes / static_cast<int64_t>(sizeof(typename Shape::Word))),
                                    static_cast<int64_t>(block) * kLocateWarps + warp, lane, shared);
    });
  });
}

}  // namespace

struct Sizes {
  int64_t seats, tokens, listed, pages, staging, device_slots, layers, host_rows, bytes;
  int32_t entries, is_aligned;
  uint64_t seed;
};

extern "C" void Locate(const Sizes* sizes, const int32_t* slot_of, const int32_t* layer, const int32_t* page_table,
                       const int32_t* page_count, const int32_t* lengths, const int32_t* positions, std::byte* fresh,
                       const int32_t* staged_rows, std::byte* staged, std::byte* pool, int32_t* places,
                       std::byte* fetched, char* error) {
  const auto& [seats, tokens, listed, pages, staging, device_slots, layers, host_rows, bytes, entries, is_aligned, seed] =
      *sizes;
  const int64_t lists = seats * tokens;
  LocateViews views;
  views.slot_of = slot_of;
  views.layer = layer;
  views.page_table = page_table;
  views.page_count = page_count;
  views.lengths = lengths;
  views.positions = positions;
  views.staged_rows = staged_rows;
  views.places = places;
  views.fresh = {fresh, lists, bytes};
  views.staged = {staged, seats * staging, bytes};
  views.fetched = {fetched, lists + lists * listed, bytes};
  views.pool = {{pool, layers * host_rows, bytes}, layers, host_rows};
  views.seats = static_cast<int32_t>(seats);
  views.tokens = static_cast<int32_t>(tokens);
  views.listed = static_cast<int32_t>(listed);
  views.pages = static_cast<int32_t>(pages);
  views.staging = static_cast<int32_t>(staging);
  views.device_slots = static_cast<int32_t>(device_slots);
  readable.clear();
  for (const Records& records : {views.fresh, views.staged, views.pool.records}) {
    readable.emplace_back(records.data, records.data + records.count * bytes);
  }
  has_strayed = false;
  try {
    entries == 8 ? Run<8>(views, is_aligned, seed) : Run<16>(views, is_aligned, seed);
    if (has_strayed) throw std::runtime_error("the kernel reads outside its operands, or unaligned");
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), 199);
  }
}
