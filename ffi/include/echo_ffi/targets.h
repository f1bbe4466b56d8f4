// What the shared library promises to Python: names, numbers and the meaning of each target. Knows bytes in rows and
// numbers in lists, nothing of requests, pages or models. Every platform implements the same targets under the same
// names; the handler symbols differ only in their suffix (EchoRecallCpu is "echo_recall" on platform "cpu").
//
// Letters: L layers, N_H host rows, N_G device slots, M list length. "record" is one row's bytes: any element type, any
// trailing shape, a whole number of 4-byte words (fastest in multiples of 16 bytes). Row and slot numbers are i32; every
// offset is computed in 64 bits, since row * bytes_per_record passes 2^31 in pools that fit one machine.
//
// A number outside its pool: on a CPU the call is refused before a byte moves. On a GPU, where the numbers are on the
// device and nobody waits for them, the entry is skipped: no target ever reads or writes outside its operands.
//
// echo_recall(records [N_G, record], host_pool [L, N_H, record], layer i32[], count i32[], host_rows i32[M],
//             slots i32[M], source i32[M], new [E_new, record], staged [E_staged, record]) -> records, aliased
//   for each m < count with host_rows[m] >= 0 and slots[m] >= 0:
//     records[slots[m]] = host_pool[layer, host_rows[m]]      where source[m] == kSourceHost
//                         new[source[m]]                      where source[m] < E_new
//                         staged[source[m] - E_new]           elsewhere
//   No other slot changes. Active slots must be distinct. The lists may be as long as a step can need; only `count`
//   entries are looked at.
//
// echo_zeros(buffer, any shape) -> buffer, aliased: zeros, wherever the buffer lies. How a host pool comes by its zeros
//   without a copy of it in another memory.
//
// echo_read_rows(host_pool [L, N_H, record], layer i32[] or i32[G], rows i32[G * M]) -> [G * M, record]
//   result[g * M + m] = rows[g * M + m] >= 0 ? host_pool[layer[g], rows[g * M + m]] : zeros
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
//
// echo_allocate(slot_of i32[N_H], host_of i32[N_G], priority i32[N_G], free bool[N_G], rows i32[M],
//               touched i32[M] or i32[1], staged i32[E]; per_seat i64, new_per_seat i64, blocks i64)
//     -> slot_of, host_of, priority, free (all aliased), slots i32[M], fill_rows i32[M], fill_slots i32[M],
//        fill_mention i32[M], fill_source i32[M], to_fill i32[], hits i32[], useful i32[], recalled i32[], written i32[],
//        evicted i32[], scratch i32[12 M + 20]
//   The whole of pool.allocate in echo_jax/pool.py, whose jnp form is the meaning, bit for bit. One number in touched is
//   the priority of all entries. to_fill counts the entries to fill. scratch is the implementation's own and says nothing.
//   blocks is the size of the cluster on a GPU, 8 or 16, or 0 for what suits it; on a CPU it says nothing. More different
//   rows than the pool has slots: refused on a CPU; on a GPU the last of them get no slot.
//
// echo_require(slot_of, host_of, priority, free, table i32[B, P], new_rows i32[B, T], positions i32[B, S],
//              touched i32[B (T + S)] or i32[1], staged i32[E], records [N_G, record], host_pool [L, N_H, record],
//              layer i32[], new [B T, record], staged_records [E, record])
//     -> slot_of, host_of, priority, free, records (all aliased), slots i32[B, S], to_fill i32[], hits i32[], useful i32[],
//        recalled i32[], written i32[], evicted i32[], scratch i32[16 B (T + S) + 20]
//   echo_allocate, then echo_recall of the fills that it lists, as one launch. A seat's list is its new rows, then those
//   of its positions, table[b, positions[b, s]] or -1 where the position is negative. slots are those of the positions.
//
// echo_release(slot_of, host_of, priority, free, is_dropped bool[N_H]) -> slot_of, host_of, priority, free, all aliased
//   pool.release: rows where is_dropped says so lose their slots.
//
// echo_encode(index_keys [pages, page], rows i32[M], index_key f32[M, D], record f32[M, W], query f32[N, G, D],
//             weights f32[N, G]; latent i64)
//     -> index_keys, aliased, stored [M, stored record], codes [N, G, D], scaled f32[N, G]
//   What a step stores of its new tokens in one layer and asks with, by the forms of echo_jax/formats.py, whose jnp form
//   is the meaning, on a CPU bit for bit but for the sign and the payload of a NaN. Element types say the forms: keys u8
//   (FP8), bf16 or f32, codes f8e4m3fn, bf16 or f32 as the keys are, stored u32 (FP8), bf16 or f32. index_key[m] goes to
//   row rows[m], where that is not negative; active rows must be distinct. scaled is weights, times the scale of the
//   codes where they are FP8. Quotients are rounded once, on a GPU too, where XLA's need not be. D, latent and W - latent
//   must be multiples of 4, and latent of 128 where stored is FP8.
//
// echo_locate(slot_of i32[L, N_H], layer i32[], page_table i32[B, P / 64], page_count i32[N_H / 64], lengths i32[B],
//             positions i32[B, T, K], new [B, T, record], staged_rows i32[B, S], staged [B, S, record],
//             host_pool [L, N_H, record]; device_slots i64)
//     -> places i32[B, T, K], fetched [B T + B T K, record]
//   echo_jax/locate.py, whose jnp form is the meaning: the place of every listed record, the missing ones fetched from
//   staging or the host. No operand is written. Of fetched, the new records and the places that are named are written and
//   the rest is not. Lists are strictly ascending, then negative.
//
// echo_top_k(score f32|bf16[N, P], visible i32[N]; k i64) -> positions i32[N, k], kth_score f32[N]
//   indexer.select: the k best of the first visible[n] scores of row n, in the order of scores of echo_jax/indexer.py,
//   as ascending positions followed by -1, and the lowest selected score (-0 as +0; the NaN 0x7fc00000 where it is a NaN
//   and where nothing is selected). visible[n] outside 0..P means the nearer end. A GPU refuses k above 4096.
//
// echo_bounded_top_k(score f32|bf16[N, P], visible i32[N], bound f32[N], above u32[N, W]; k i64)
//     -> positions i32[N, k], kth_score f32[N]
//   echo_top_k, sooner where the caller knows a score that somewhat more than k visible ones of a row exceed: its bound.
//   Whatever that is, it changes what the call costs and nothing else. W = 0, or W = ceil(P / 32) and above marks the
//   positions that exceed it: bit p mod 32 of word p / 32. Other visible positions may be marked too, but each whose score
//   exceeds the bound must be: where k marked ones do, no score that is not marked is looked at. A row with fewer, and on
//   a GPU one with more than 12,288 marks, is selected from as a whole.
#ifndef ECHO_FFI_TARGETS_H_
#define ECHO_FFI_TARGETS_H_

#include <cstdint>

namespace echo_ffi {

// Raised whenever the arguments or the meaning of a target change; echo_jax/_ffi.py holds the same number and
// refuses a library with another one.
inline constexpr int32_t kLibraryVersion = 11;

// In `source` of echo_recall: the bytes come from the host pool. Values >= 0 count rows of `new`, then of `staged`.
inline constexpr int32_t kSourceHost = -1;

}  // namespace echo_ffi

#endif  // ECHO_FFI_TARGETS_H_
