// The one inner loop of all products here: rows of x times a panel of columns, sums in registers.
//
// Every sum runs over k in order, one fused multiply-add after the other, in its own lane: a result has the same bits
// whatever the number of rows, the tile it falls into, or the vector width.
#pragma once

#include "vec.h"

namespace baton {

constexpr int PANEL = 16;  // columns of a panel
constexpr int NV = PANEL / W;
constexpr int MAX_TILE_ROWS = 6;

// out[r][0..16) (+)= sum over k of x[r][k] * w[k][0..16); R rows.
template <int R, bool ADD>
inline void tile(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t num_k, float* out, int64_t ldo) {
    vf acc[R][NV];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) acc[r][v] = ADD ? load(out + r * ldo + v * W) : vf{};
    for (int64_t k = 0; k < num_k; k++, w += ldw) {
        vf columns[NV];
        for (int v = 0; v < NV; v++) columns[v] = load(w + v * W);
        for (int r = 0; r < R; r++) {
            const vf xr = broadcast(x[r * ldx + k]);
            for (int v = 0; v < NV; v++) acc[r][v] = xr * columns[v] + acc[r][v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < NV; v++) store(out + r * ldo + v * W, acc[r][v]);
}

// Any number of rows, in tiles as even as they go.
template <bool ADD>
inline void panel_product(const float* x, int64_t ldx, int64_t num_rows, const float* w, int64_t ldw, int64_t num_k,
                          float* out, int64_t ldo) {
    int64_t num_tiles = (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t low = 0; low < num_rows; num_tiles--) {
        const int64_t rows = (num_rows - low + num_tiles - 1) / num_tiles;
        const float* xs = x + low * ldx;
        float* to = out + low * ldo;
        switch (rows) {
            case 6: tile<6, ADD>(xs, ldx, w, ldw, num_k, to, ldo); break;
            case 5: tile<5, ADD>(xs, ldx, w, ldw, num_k, to, ldo); break;
            case 4: tile<4, ADD>(xs, ldx, w, ldw, num_k, to, ldo); break;
            case 3: tile<3, ADD>(xs, ldx, w, ldw, num_k, to, ldo); break;
            case 2: tile<2, ADD>(xs, ldx, w, ldw, num_k, to, ldo); break;
            default: tile<1, ADD>(xs, ldx, w, ldw, num_k, to, ldo); break;
        }
        low += rows;
    }
}

}  // namespace baton
