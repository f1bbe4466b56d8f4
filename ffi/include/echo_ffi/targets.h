// What the shared library promises to Python: names, numbers and the meaning of each target. Knows bytes in rows,
// nothing of requests, pages or models. Every platform implements the same four targets under the same names; the
// handler symbols differ only in their suffix (EchoRecallCpu is "echo_recall" on platform "cpu").
//
// Letters: L layers, N_H host rows, N_G device slots, M list length, E extra rows. "record" is one row's bytes: any
// element type, any trailing shape, a whole number of 4-byte words. Row and slot numbers are i32; every offset is
// computed in 64 bits, since row * bytes_per_record passes 2^31 in pools that fit one machine.
//
// echo_recall(records [N_G, record], host_pool [L, N_H, record], layer i32[], host_rows i32[M], slots i32[M],
//             source i32[M], extra [E, record]) -> records, aliased
//   for each m with host_rows[m] >= 0 and slots[m] >= 0:
//     records[slots[m]] = source[m] == kSourceHost ? host_pool[layer, host_rows[m]] : extra[source[m]]
//   No other slot changes. Active slots must be distinct.
//
// echo_read_rows(host_pool [L, N_H, record], layer i32[], rows i32[M]) -> [M, record]
//   result[m] = rows[m] >= 0 ? host_pool[layer, rows[m]] : zeros
//
// echo_write_back(host_pool [L, N_H, record], records [L, M, record], rows i32[M]) -> host_pool, aliased
//   for each m with rows[m] >= 0, for every layer l: host_pool[l, rows[m]] = records[l, m]
//   Active rows must be distinct.
//
// echo_copy_rows(host_pool [L, N_H, record], source i32[M], target i32[M]) -> host_pool, aliased
//   for each m with source[m] >= 0 and target[m] >= 0, for every layer l:
//     host_pool[l, target[m]] = host_pool[l, source[m]]
//   Active targets must be distinct, and none may be the source of another entry: then the order of the copies, which
//   differs between platforms, cannot matter.
#ifndef ECHO_FFI_TARGETS_H_
#define ECHO_FFI_TARGETS_H_

#include <cstdint>

namespace echo_ffi {

// Raised whenever the arguments or the meaning of a target change; echo_jax/_ffi.py holds the same number and
// refuses a library with another one.
inline constexpr int32_t kLibraryVersion = 1;

// In `source` of echo_recall: the bytes come from the host pool. Values >= 0 count rows of `extra`.
inline constexpr int32_t kSourceHost = -1;

}  // namespace echo_ffi

#endif  // ECHO_FFI_TARGETS_H_
