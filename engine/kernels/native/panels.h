// How a matrix [N, K] is packed for products: in panels of 16 rows (the last is filled up with zeros), a panel in groups
// of 32 along k:
//
//     int8     d [16] half   q [32 k][16] int8                          w = d * q + m
//     int4     d [16] half   q [4][16] uint32, nibble i of word j is k = 8 j + i         m = -8 d
//     int4m    d [16] half   m [16] half   q as int4
//     floats   [32 k][16] float
//     halves   [16][16] uint32: the bfloat16 of k = 2 i and, above it, of 2 i + 1
//
// so a register holds 16 (or 8) rows of the same k, and what is read is read in order. Numbers fill K up with zeros.
#pragma once

#include "gemm.h"

namespace baton {

constexpr int GROUP = 32;

enum Kind { INT8 = 0, INT4 = 1, INT4M = 2, FLOATS = 3, HALVES = 4 };

constexpr int64_t group_bytes(int kind) {
    switch (kind) {
        case INT8: return 2 * PANEL + GROUP * PANEL;
        case INT4: return 2 * PANEL + GROUP * PANEL / 2;
        case INT4M: return 4 * PANEL + GROUP * PANEL / 2;
        case FLOATS: return 4 * GROUP * PANEL;
        default: return 2 * GROUP * PANEL;
    }
}

}  // namespace baton
