// The one inner loop of all products here: rows of x times a panel of columns, sums in registers.
//
// Every sum runs over k in order, one fused multiply-add after the other, in its own lane: a result has the same bits
// whatever the number of rows, the tile it falls into, or the vector width.
#pragma once

#include <type_traits>

#include "vec.h"

namespace baton {

constexpr int PANEL = 16;  // columns of a panel
constexpr int NV = PANEL / W;
constexpr int MAX_TILE_ROWS = 6;

// out[r][0..N * W) (+)= sum over k of x[r][k] * w[k][0..N * W); R rows.
template <int R, bool ADD, int N = NV>
inline void tile(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t num_k, float* out, int64_t ldo) {
    vf acc[R][N];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N; v++) acc[r][v] = ADD ? load(out + r * ldo + v * W) : vf{};
    for (int64_t k = 0; k < num_k; k++, w += ldw) {
        vf columns[N];
        for (int v = 0; v < N; v++) columns[v] = load(w + v * W);
        for (int r = 0; r < R; r++) {
            const vf xr = broadcast(x[r * ldx + k]);
            for (int v = 0; v < N; v++) acc[r][v] = xr * columns[v] + acc[r][v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N; v++) store(out + r * ldo + v * W, acc[r][v]);
}

template <int MAX, int R = 1, class F>
inline void in_tiles_of(int64_t rows, int64_t low, F use) {
    if constexpr (R < MAX) {
        if (rows != R) return in_tiles_of<MAX, R + 1>(rows, low, use);
    }
    use(std::integral_constant<int, R>(), low);
}

// Any number of rows in tiles of at most MAX, as even as they go: `use` is called with the rows of each, as a constant,
// and the first of them.
template <int MAX, class F>
inline void in_tiles(int64_t num_rows, F use) {
    int64_t num_tiles = (num_rows + MAX - 1) / MAX;
    for (int64_t low = 0, rows; low < num_rows; low += rows, num_tiles--) {
        rows = (num_rows - low + num_tiles - 1) / num_tiles;
        in_tiles_of<MAX>(rows, low, use);
    }
}

}  // namespace baton
