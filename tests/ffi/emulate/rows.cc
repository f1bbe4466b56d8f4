// The kernel of ffi/src/rows_kernel.cuh with the jobs of rows_jobs.cuh on the emulated GPU, for test_ffi_rows_kernel.py to
// call. A read outside what may be read, or one that is not aligned, is an error here, where a GPU would often let it pass;
// so is a row that the wrong kind of block moves where helpers divide a list with movers.
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "gpu.h"

namespace {

struct Range {
  const std::byte *from, *to;
  bool is_far = false;
};
std::vector<Range> readable;
bool has_strayed = false, has_swapped = false, is_divided = false;
int first_helper = 0;

template <typename Word>
Word Read(const Word* at) {
  const auto* first = reinterpret_cast<const std::byte*>(at);
  for (const Range& range : readable) {
    const bool is_inside = first >= range.from && first + sizeof(Word) <= range.to;
    if (!is_inside || reinterpret_cast<uintptr_t>(at) % sizeof(Word) != 0) continue;
    has_swapped |= is_divided && range.is_far != (emulate::Here().running().block < first_helper);
    return *at;
  }
  has_strayed = true;
  return Word{};
}

}  // namespace

namespace echo_ffi {

struct ReadOnly {
  template <typename Word>
  static Word Load(const Word* at) {
    return Read(at);
  }
};
struct ReadWrite : ReadOnly {};

}  // namespace echo_ffi

#include "rows_jobs.cuh"

namespace {

using namespace echo_ffi;

Range RangeOf(const DeviceRecords& records) { return {records.data, records.data + records.count * records.bytes}; }
Range RangeOf(const DevicePool& pool) { return {pool.data, pool.data + pool.layers * pool.rows * pool.bytes, true}; }

template <bool kIsHelped = false, typename Jobs>
void Run(const Jobs& jobs, int64_t bytes, bool is_aligned, int movers, int helpers, uint64_t seed,
         std::vector<Range> may_be_read, char* error) {
  try {
    readable = std::move(may_be_read);
    has_strayed = has_swapped = false;
    is_divided = kIsHelped && jobs.Limit() > movers * kBlockWarps;
    first_helper = movers;
    const int blocks = movers + helpers;
    emulate::Gpu gpu(blocks, sizeof(ListedRows), seed);
    WithShape(bytes, is_aligned, [&](auto shape) {
      using Chosen = ShapeFor<Jobs, decltype(shape)>;
      using Word = typename Chosen::Word;
      gpu.Run([&] {
        const int block = emulate::Here().running().block;
        MoveEvenly<Jobs, Word, Chosen::kLoads, Chosen::kMerged, Chosen::kMergedLoads, kIsHelped>(
            jobs, static_cast<int>(bytes / sizeof(Word)), block, blocks, movers,
            reinterpret_cast<ListedRows*>(emulate::Here().shared(block)));
      });
    });
    if (has_strayed) throw std::runtime_error("the kernel reads outside its operands, or unaligned");
    if (has_swapped) throw std::runtime_error("movers move rows of device memory, or helpers of host memory");
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), 199);
  }
}

}  // namespace

extern "C" {

struct Sizes {
  int64_t slots, fresh, staged, layers, rows, bytes, length;
  int32_t is_aligned, blocks, helpers;
  uint64_t seed;
};

void EmulateRecall(const Sizes* s, std::byte* records, std::byte* pool, const int32_t* layer, const int32_t* count,
                   const int32_t* host_rows, const int32_t* slots, const int32_t* source, std::byte* fresh,
                   std::byte* staged, char* error) {
  const RecallJobs jobs{{records, s->slots, s->bytes}, {fresh, s->fresh, s->bytes},
                        {staged, s->staged, s->bytes}, {pool, s->layers, s->rows, s->bytes},
                        layer,                         count,
                        host_rows,                     slots,
                        source,                        s->length};
  const std::vector<Range> may_be_read{RangeOf(jobs.fresh), RangeOf(jobs.staged), RangeOf(jobs.pool)};
  if (s->helpers > 0) {
    Run<true>(jobs, s->bytes, s->is_aligned, s->blocks, s->helpers, s->seed, may_be_read, error);
  } else {
    Run(jobs, s->bytes, s->is_aligned, s->blocks, 0, s->seed, may_be_read, error);
  }
}

void EmulateReadRows(const Sizes* s, std::byte* out, std::byte* pool, const int32_t* layer, const int32_t* rows,
                     const int64_t* entries, char* error) {
  const DevicePool of_rows{pool, s->layers, s->rows, s->bytes};
  const ReadRowsJobs jobs{{out, s->length, s->bytes}, of_rows, layer, rows, *entries, s->length};
  Run(jobs, s->bytes, s->is_aligned, s->blocks, 0, s->seed, {RangeOf(jobs.pool)}, error);
}

void EmulateWriteBack(const Sizes* s, std::byte* pool, std::byte* records, const int32_t* rows, char* error) {
  const int64_t jobs_count = s->layers * s->length;
  const WriteBackJobs jobs{
      {records, jobs_count, s->bytes}, {pool, s->layers, s->rows, s->bytes}, rows, s->length, jobs_count};
  Run(jobs, s->bytes, s->is_aligned, s->blocks, 0, s->seed, {RangeOf(jobs.records)}, error);
}

void EmulateCopyRows(const Sizes* s, std::byte* pool, const int32_t* source, const int32_t* target, char* error) {
  const CopyRowsJobs jobs{
      {pool, s->layers, s->rows, s->bytes}, source, target, s->length, s->layers * s->length};
  Run(jobs, s->bytes, s->is_aligned, s->blocks, 0, s->seed, {RangeOf(jobs.pool)}, error);
}

}  // extern "C"
