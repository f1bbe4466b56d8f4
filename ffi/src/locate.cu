// echo_locate on a GPU: one launch. The handler looks at shapes; the layer and all numbers in lists are judged on the device.
#include <cstdint>

#include "echo_ffi/launch.cuh"
#include "echo_ffi/locate.h"
#include "locate_kernel.cuh"

namespace echo_ffi {
namespace {

template <int kEntries, typename Shape>
__global__ void __launch_bounds__(kLanes* kLocateWarps) LocateKernel(LocateViews views, int words) {
  __shared__ WarpRows shared[kLocateWarps];
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  LocateInWarp<kEntries, Shape>(views, words, static_cast<int64_t>(blockIdx.x) * kLocateWarps + warp, lane,
                                shared + warp);
}

template <int kEntries>
void Launch(const LocateViews& views, bool is_aligned, cudaStream_t stream) {
  const int64_t blocks = (LocateGrid(views, kEntries).all + kLocateWarps - 1) / kLocateWarps;
  const int64_t bytes = views.pool.records.record_bytes;
  WithShape(bytes, is_aligned, [&](auto shape) {
    using Shape = LocateShape<decltype(shape)>;
    // Nothing to do is launched too: a command buffer wants something to record.
    LocateKernel<kEntries, Shape><<<static_cast<unsigned>(blocks < 1 ? 1 : blocks), kLanes * kLocateWarps, 0, stream>>>(
        views, static_cast<int>(bytes / static_cast<int64_t>(sizeof(typename Shape::Word))));
  });
}

ffi::Error Locate(cudaStream_t stream, Numbers slot_of, Numbers layer, Numbers page_table, Numbers page_count,
                  Numbers lengths, Numbers positions, ffi::AnyBuffer fresh, Numbers staged_rows, ffi::AnyBuffer staged,
                  ffi::AnyBuffer pool, int64_t device_slots, ffi::Result<Numbers> places,
                  ffi::Result<ffi::AnyBuffer> fetched) {
  LocateViews views;
  ECHO_RETURN_IF_ERROR(ViewLocate(slot_of, layer, page_table, page_count, lengths, positions, fresh, staged_rows, staged,
                                  pool, device_slots, places, fetched, &views));
  bool is_aligned = true;
  for (const void* data : {views.fresh.data, views.staged.data, views.fetched.data, views.pool.records.data}) {
    is_aligned &= reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
  if (static_cast<int64_t>(views.lists()) * views.listed <= kMostEntriesByEight) {
    Launch<8>(views, is_aligned, stream);
  } else {
    Launch<16>(views, is_aligned, stream);
  }
  return Launched(kLocate);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoLocateCuda, Locate, BindLocate(ffi::Ffi::Bind().Ctx<Stream>()),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace echo_ffi
