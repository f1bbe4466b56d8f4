// The targets of targets.h that move rows, on a GPU: each is a list of jobs (rows_jobs.cuh) for the one kernel of
// rows_kernel.cuh.
//
// Host memory is read and written where it lies, through the address the GPU shares with the host. The handlers look at
// shapes and launch; numbers in lists, the layer and the count are on the device and judged there.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "echo_ffi/launch.cuh"
#include "echo_ffi/rows.h"
#include "echo_ffi/targets.h"
#include "fill_zeros.cuh"
#include "rows_jobs.cuh"

namespace echo_ffi {
namespace {

DeviceRecords OnDevice(const Records& records) { return {records.data, records.count, records.record_bytes}; }

DevicePool OnDevice(const Pool& pool) { return {pool.records.data, pool.layers, pool.rows, pool.records.record_bytes}; }

// Records that are a multiple of 16 bytes long lie on multiples of 16 if the first one does.
bool IsAligned(std::initializer_list<const void*> buffers) {
  for (const void* buffer : buffers) {
    if (reinterpret_cast<uintptr_t>(buffer) % 16 != 0) return false;
  }
  return true;
}

template <typename Jobs>
ffi::Error Run(const char* target, const Jobs& jobs, int64_t record_bytes, bool is_aligned, cudaStream_t stream) {
  // An empty list is launched too: a command buffer wants something to record, and such a kernel ends at once.
  LaunchMove(jobs, record_bytes, is_aligned, Blocks(jobs.length, record_bytes), stream);
  return Launched(target);
}

ffi::Error Recall(cudaStream_t stream, ffi::AnyBuffer records, ffi::AnyBuffer pool, Numbers layer, Numbers count,
                  Numbers host_rows, Numbers slots, Numbers source, ffi::AnyBuffer fresh, ffi::AnyBuffer staged,
                  ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_recall";
  RecallViews views;
  ECHO_RETURN_IF_ERROR(ViewRecall(kTarget, records, pool, layer, count, host_rows, slots, source, fresh, staged, result,
                                  &views));
  const RecallJobs jobs{OnDevice(views.records), OnDevice(views.fresh), OnDevice(views.staged), OnDevice(views.pool),
                        layer.typed_data(),      count.typed_data(),    views.host_rows,        views.slots,
                        views.source,            views.length};
  const bool is_aligned =
      IsAligned({views.records.data, views.fresh.data, views.staged.data, views.pool.records.data});
  // How many rows come from where is known on the device only; here, how many could come from device memory.
  const unsigned movers = Blocks(jobs.length, views.records.record_bytes);
  const unsigned helpers = Helpers(std::min(jobs.length, views.fresh.count + views.staged.count), movers);
  if (helpers == 0) return Run(kTarget, jobs, views.records.record_bytes, is_aligned, stream);
  LaunchHelpedMove(jobs, views.records.record_bytes, is_aligned, movers, helpers, stream);
  return Launched(kTarget);
}

ffi::Error Zeros(cudaStream_t stream, ffi::AnyBuffer buffer, ffi::Result<ffi::AnyBuffer> result) {
  ECHO_RETURN_IF_ERROR(SameBuffer("echo_zeros", "buffer", buffer.untyped_data(), result->untyped_data()));
  LaunchFillZeros(result->untyped_data(), static_cast<int64_t>(result->size_bytes()), stream);
  return Launched("echo_zeros");
}

ffi::Error ReadRows(cudaStream_t stream, ffi::AnyBuffer pool_buffer, Numbers layer, Numbers rows,
                    ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_read_rows";
  Pool pool;
  Records out;
  ECHO_RETURN_IF_ERROR(ViewReadRows(kTarget, pool_buffer, layer, rows, result, &pool, &out));
  const int64_t entries = out.count / std::max<int64_t>(layer.element_count(), 1);
  const ReadRowsJobs jobs{OnDevice(out), OnDevice(pool), layer.typed_data(), rows.typed_data(), entries, out.count};
  return Run(kTarget, jobs, out.record_bytes, IsAligned({out.data, pool.records.data}), stream);
}

ffi::Error WriteBack(cudaStream_t stream, ffi::AnyBuffer pool_buffer, ffi::AnyBuffer records_buffer, Numbers rows,
                     ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_write_back";
  Pool pool;
  Records records;
  ECHO_RETURN_IF_ERROR(ViewWriteBack(kTarget, pool_buffer, records_buffer, rows, result, &pool, &records));
  const int64_t entries = rows.element_count();
  const WriteBackJobs jobs{OnDevice(records), OnDevice(pool), rows.typed_data(), entries, pool.layers * entries};
  return Run(kTarget, jobs, records.record_bytes, IsAligned({records.data, pool.records.data}), stream);
}

ffi::Error CopyRows(cudaStream_t stream, ffi::AnyBuffer pool_buffer, Numbers source, Numbers target,
                    ffi::Result<ffi::AnyBuffer> result) {
  constexpr const char* kTarget = "echo_copy_rows";
  Pool pool;
  ECHO_RETURN_IF_ERROR(ViewCopyRows(kTarget, pool_buffer, source, target, result, &pool));
  const int64_t entries = source.element_count();
  const CopyRowsJobs jobs{OnDevice(pool), source.typed_data(), target.typed_data(), entries, pool.layers * entries};
  return Run(kTarget, jobs, pool.records.record_bytes, IsAligned({pool.records.data}), stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoRecallCuda, Recall,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::AnyBuffer>()   // records
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<Numbers>()          // layer
                                  .Arg<Numbers>()          // count
                                  .Arg<Numbers>()          // host_rows
                                  .Arg<Numbers>()          // slots
                                  .Arg<Numbers>()          // source
                                  .Arg<ffi::AnyBuffer>()   // new
                                  .Arg<ffi::AnyBuffer>()   // staged
                                  .Ret<ffi::AnyBuffer>(),  // records
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoZerosCuda, Zeros,
                              ffi::Ffi::Bind().Ctx<Stream>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoReadRowsCuda, ReadRows,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<Numbers>()          // layer
                                  .Arg<Numbers>()          // rows
                                  .Ret<ffi::AnyBuffer>(),  // rows' records
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoWriteBackCuda, WriteBack,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<ffi::AnyBuffer>()   // records
                                  .Arg<Numbers>()          // rows
                                  .Ret<ffi::AnyBuffer>(),  // host_pool
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EchoCopyRowsCuda, CopyRows,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<ffi::AnyBuffer>()   // host_pool
                                  .Arg<Numbers>()          // source
                                  .Arg<Numbers>()          // target
                                  .Ret<ffi::AnyBuffer>(),  // host_pool
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace echo_ffi
