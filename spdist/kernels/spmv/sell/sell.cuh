// sell.cuh: a SELL chunk, as `build.cu` writes it and `multiply.cu` reads it.
//
// M. Kreutzer, G. Hager, G. Wellein, "A Unified Sparse Matrix Storage Format for Heterogeneous Systems", poster, and
// SIAM J. Sci. Comput. 36(5), 2014. Sharing a row among T threads is the poster's outlook. The kinds of chunk are ours.
//
// A SELL chunk is 32 lanes wide. Lane l serves the row at position first + l / T, where T = 1, 2, ..., 32; the T lanes of a
// row take its entries alternately. Slot s of a chunk holds one value for each lane (BLOCK values in a chunk of blocks):
//   WIDE          columns as 32-bit numbers, PADDING where a row has ended
//   NARROW        columns as 16-bit offsets from the slot's base, 0xffff where a row has ended
//   DIAGONAL      a slot is a piece of a diagonal: one offset (column less position) and a bit for each lane that has it;
//                 chunks of equal lists of such pairs share the first chunk's list
//   BLOCK_WIDE    rows in dense blocks of BLOCK x BLOCK: one block column for each block row and slot
//   BLOCK_NARROW  block columns as 16-bit offsets from the slot's base
// The 16-bit offsets of a chunk start after the bases of its slots, at a multiple of BASES bases.
// Rows of more than a few thousand entries stay in CSR: a thread block for each row, or for each of its pieces.
#pragma once
#include "common.cuh"

enum Kind { SPDIST_CHUNK_KIND };
constexpr int PADDING = SPDIST_SELL_PADDING, WARPS = SPDIST_SELL_WARPS, BASES = SPDIST_SELL_BASES;

struct __align__(16) Chunk {
    i64 values, index;  // places of the first slot in `values`, and in `wide` or `narrow`
    int first, width, unused, code;
    __device__ int kind() const { return code & 15; }
    __device__ int log_threads() const { return code >> 4 & 15; }
    __device__ int rows() const { return code >> 8 & 255; }  // above: slots that no row leaves empty, up to MOST_FULL
};

// Most block columns of a slot: 32 rows are in at most this many block rows.
template <int BLOCK>
__device__ constexpr int block_rows() { return 32 % BLOCK == 0 ? 32 / BLOCK : 32 / BLOCK + 2; }

__device__ __forceinline__ i64 round_up(const i64 a, const i64 b) { return (a + b - 1) / b * b; }

// 16-bit numbers before the offsets of a chunk: the bases of its slots, padded so that four can be read at a time.
__device__ __forceinline__ i64 base_room(const int width) { return 2 * round_up(width, BASES); }
