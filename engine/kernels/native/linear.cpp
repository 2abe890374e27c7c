// Products with packed weights (panels.h): of 4 or 8 bits, w = d * q + m over groups of 32 along a row, or numbers.
//
// d * q is exact in float32, so d * q + m is the number that expanding the file gives. A few rows of x are multiplied
// with weights straight from their registers; for more, panels are expanded into scratch once and all rows go over them.
// A row has the same bits in every batch.
#include <cstdlib>
#include <vector>

#include "panels.h"

namespace baton {
namespace {

constexpr int64_t MAX_SCRATCH_BYTES = 192 << 10;  // of expanded panels: they stay in the second-level cache

// One group of P neighbouring panels: N registers of columns for each k. Their sums are independent of each other, which
// hides the latency of an addition where there is but one row.
template <int P>
struct Int8 {
    static constexpr int PANELS = P, N = P * NV;
    static constexpr int64_t GROUP_BYTES = group_bytes(INT8);
    vf d[N];
    const int8_t* q[P];
    void open(const uint8_t* group, int64_t panel_bytes) {
        for (int p = 0; p < P; p++, group += panel_bytes) {
            for (int v = 0; v < NV; v++) d[p * NV + v] = load_half((const uint16_t*)group + v * W);
            q[p] = (const int8_t*)group + 2 * PANEL;
        }
    }
    template <class F>
    void each_k(F use) const {
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k++) {
            vf w[N];
            for (int v = 0; v < N; v++) w[v] = int8_to_float(q[v / NV] + k * PANEL + v % NV * W) * d[v];
            use(k, w);
        }
    }
};

template <bool HAS_MIN, int P>
struct Int4 {
    static constexpr int PANELS = P, N = P * NV;
    static constexpr int64_t GROUP_BYTES = group_bytes(HAS_MIN ? INT4M : INT4);
    // d / 16^i: a nibble is masked where it stands and not shifted, which makes it 16^i times too large. Powers of two
    // round nothing. The last would be the sign, so it is shifted.
    vf d[7][N], m[N];
    const uint32_t* q[P];
    void open(const uint8_t* group, int64_t panel_bytes) {
        for (int p = 0; p < P; p++, group += panel_bytes) {
            for (int v = 0; v < NV; v++) {
                const int at = p * NV + v;
                d[0][at] = load_half((const uint16_t*)group + v * W);
                m[at] = HAS_MIN ? load_half((const uint16_t*)group + PANEL + v * W) : d[0][at] * -8.0f;
                for (int i = 1; i < 7; i++) d[i][at] = d[i - 1][at] * 0.0625f;
            }
            q[p] = (const uint32_t*)(group + (HAS_MIN ? 4 : 2) * PANEL);
        }
    }
    template <class F>
    void each_k(F use) const {
        for (int j = 0; j < GROUP / 8; j++) {
            vu words[N];
            for (int v = 0; v < N; v++) words[v] = load_as<vu>(q[v / NV] + j * PANEL + v % NV * W);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                vf w[N];
                for (int v = 0; v < N; v++) {
                    const vi nibbles = i < 7 ? (vi)(words[v] & (15u << 4 * i)) : (vi)(words[v] >> 28);
                    w[v] = __builtin_convertvector(nibbles, vf) * d[i % 7][v] + m[v];
                }
                use(8 * j + i, w);
            }
        }
    }
};

template <int P>
struct Floats {
    static constexpr int PANELS = P, N = P * NV;
    static constexpr int64_t GROUP_BYTES = group_bytes(FLOATS);
    const float* w[P];
    void open(const uint8_t* group, int64_t panel_bytes) {
        for (int p = 0; p < P; p++, group += panel_bytes) w[p] = (const float*)group;
    }
    template <class F>
    void each_k(F use) const {
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k++) {
            vf columns[N];
            for (int v = 0; v < N; v++) columns[v] = load(w[v / NV] + k * PANEL + v % NV * W);
            use(k, columns);
        }
    }
};

template <int P>
struct Halves {
    static constexpr int PANELS = P, N = P * NV;
    static constexpr int64_t GROUP_BYTES = group_bytes(HALVES);
    const uint32_t* w[P];
    void open(const uint8_t* group, int64_t panel_bytes) {
        for (int p = 0; p < P; p++, group += panel_bytes) w[p] = (const uint32_t*)group;
    }
    template <class F>
    void each_k(F use) const {
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k += 2) {
            vf low[N], high[N];
            for (int v = 0; v < N; v++) {
                const vu both = load_as<vu>(w[v / NV] + k / 2 * PANEL + v % NV * W);
                low[v] = (vf)(both << 16);
                high[v] = (vf)(both & 0xffff0000u);
            }
            use(k, low);
            use(k + 1, high);
        }
    }
};

// R rows times the panels of a codec; out [R][PANELS * PANEL].
template <class Codec, int R>
void fused(const float* x, int64_t ldx, const uint8_t* panels, int64_t num_groups, float* out) {
    constexpr int N = Codec::N;
    vf acc[R][N];
    for (auto& row : acc)
        for (auto& v : row) v = vf{};
    for (int64_t g = 0; g < num_groups; g++, x += GROUP, panels += Codec::GROUP_BYTES) {
        Codec codec;
        codec.open(panels, num_groups * Codec::GROUP_BYTES);
        codec.each_k([&](int k, const vf* w) __attribute__((always_inline)) {
            for (int r = 0; r < R; r++) {
                const vf xr = broadcast(x[r * ldx + k]);
                for (int v = 0; v < N; v++) acc[r][v] = xr * w[v] + acc[r][v];
            }
        });
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < N; v++) store(out + (r * N + v) * W, acc[r][v]);
}

template <class Codec>
void expand(const uint8_t* panel, int64_t num_groups, float* w) {
    for (int64_t g = 0; g < num_groups; g++) {
        Codec codec;
        codec.open(panel + g * Codec::GROUP_BYTES, 0);
        codec.each_k([&](int k, const vf* columns) __attribute__((always_inline)) {
                for (int v = 0; v < NV; v++) store(w + (g * GROUP + k) * PANEL + v * W, columns[v]);
            });
    }
}

// Rows of `tiles` [num_rows][width], of which the first `num_columns` are wanted, to their place; plus the bias.
void deliver(const float* tiles, int64_t width, int64_t num_rows, int64_t num_columns, const float* bias, float* out,
             int64_t ldo) {
    for (int64_t r = 0; r < num_rows; r++) {
        const float* from = tiles + r * width;
        float* to = out + r * ldo;
        if (bias)
            for (int64_t c = 0; c < num_columns; c++) to[c] = from[c] + bias[c];
        else
            std::memcpy(to, from, num_columns * sizeof(float));
    }
}

struct Product {
    const uint8_t* panels;
    const float* bias;
    const float* x;
    float* out;
    int64_t num_rows, num_k, num_columns;
    int num_threads;
};

// Rows [low, low + R) times `width` panels, which lie in the cache from the second tile of rows on.
template <template <int> class Format, int R, int P>
void fused_tile(const Product& job, int64_t low, int64_t p, int64_t width, float* sums) {
    const int64_t num_groups = job.num_k / GROUP, column = p * PANEL, wide = width * PANEL;
    const uint8_t* panel = job.panels + p * num_groups * Format<1>::GROUP_BYTES;
    const float* x = job.x + low * job.num_k;
    if (width == P)
        fused<Format<P>, R>(x, job.num_k, panel, num_groups, sums);
    else
        fused<Format<1>, R>(x, job.num_k, panel, num_groups, sums);
    const int64_t left = job.num_columns - column;
    deliver(sums, wide, R, left < wide ? left : wide, job.bias ? job.bias + column : nullptr,
            job.out + low * job.num_columns + column, job.num_columns);
}

constexpr int MAX_FUSED_TILE = 5;  // more rows would not fit into the registers of AVX2

template <template <int> class Format, int P>
void few_rows(const Product& job) {
    const int64_t num_panels = (job.num_columns + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(job.num_threads) if (job.num_threads > 1)
    for (int64_t at = 0; at < num_panels; at += P) {
        float sums[MAX_FUSED_TILE * P * PANEL];
        for (int64_t p = at, width; p < at + P && p < num_panels; p += width) {
            width = p + P <= num_panels ? P : 1;
            int64_t num_tiles = (job.num_rows + MAX_FUSED_TILE - 1) / MAX_FUSED_TILE;
            for (int64_t low = 0, rows; low < job.num_rows; low += rows, num_tiles--) {
                rows = (job.num_rows - low + num_tiles - 1) / num_tiles;
                switch (rows) {
                    case 1: fused_tile<Format, 1, P>(job, low, p, width, sums); break;
                    case 2: fused_tile<Format, 2, P>(job, low, p, width, sums); break;
                    case 3: fused_tile<Format, 3, P>(job, low, p, width, sums); break;
                    case 4: fused_tile<Format, 4, P>(job, low, p, width, sums); break;
                    default: fused_tile<Format, 5, P>(job, low, p, width, sums); break;
                }
            }
        }
    }
}

template <class Codec>
void many_rows(const Product& job) {
    const int64_t num_groups = job.num_k / GROUP, num_panels = (job.num_columns + PANEL - 1) / PANEL;
    const int64_t panel_bytes = num_groups * Codec::GROUP_BYTES, expanded = job.num_k * PANEL;
    int64_t at_once = MAX_SCRATCH_BYTES / (expanded * int64_t(sizeof(float)));
    at_once = at_once < 1 ? 1 : at_once > 4 ? 4 : at_once;
#pragma omp parallel num_threads(job.num_threads) if (job.num_threads > 1)
    {
        std::vector<float> scratch(at_once * expanded + MAX_TILE_ROWS * PANEL);
        float* sums = scratch.data() + at_once * expanded;
#pragma omp for
        for (int64_t first = 0; first < num_panels; first += at_once) {
            const int64_t end = first + at_once < num_panels ? first + at_once : num_panels;
            for (int64_t p = first; p < end; p++)
                expand<Codec>(job.panels + p * panel_bytes, num_groups, scratch.data() + (p - first) * expanded);
            in_tiles<MAX_TILE_ROWS>(job.num_rows, [&](auto rows, int64_t low) {
                for (int64_t p = first; p < end; p++) {
                    const int64_t column = p * PANEL, left = job.num_columns - column;
                    tile<rows, false>(job.x + low * job.num_k, job.num_k, scratch.data() + (p - first) * expanded,
                                      PANEL, job.num_k, sums, PANEL);
                    deliver(sums, PANEL, rows, left < PANEL ? left : PANEL, job.bias ? job.bias + column : nullptr,
                            job.out + low * job.num_columns + column, job.num_columns);
                }
            });
        }
    }
}

// Panels at once, for one row and for more: four sums at least; AVX-512 has twice the registers, each as wide as a panel.
constexpr int FEW = NV == 1 ? 4 : 2;
constexpr int SOME = NV == 1 ? 2 : 1;
constexpr int64_t MAX_FUSED_ROWS = 10;  // beyond, expanding a panel once pays
constexpr int64_t MAX_ROWS = 256;       // of x at once: more would leave the second-level cache for each panel

template <template <int> class Format>
void product(const Product& whole) {
    if (whole.num_rows == 1) return few_rows<Format, FEW>(whole);
    if (whole.num_rows <= MAX_FUSED_ROWS) return few_rows<Format, SOME>(whole);
    int64_t num_parts = (whole.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t low = 0; low < whole.num_rows; num_parts--) {
        Product job = whole;
        job.num_rows = (whole.num_rows - low + num_parts - 1) / num_parts;
        job.x += low * job.num_k;
        job.out += low * job.num_columns;
        low += job.num_rows;
        many_rows<Format<1>>(job);
    }
}

// One row of a panel, as float32.
template <class Codec>
void expand_row(const uint8_t* panels, int64_t num_k, int64_t row, float* out) {
    const int64_t num_groups = num_k / GROUP;
    const uint8_t* panel = panels + row / PANEL * num_groups * Codec::GROUP_BYTES;
    const int64_t lane = row % PANEL;
    for (int64_t g = 0; g < num_groups; g++) {
        Codec codec;
        codec.open(panel + g * Codec::GROUP_BYTES, 0);
        codec.each_k([&](int k, const vf* columns) { out[g * GROUP + k] = columns[lane / W][lane % W]; });
    }
}

// The whole matrix [N, K] in bfloat16, for machines that multiply it faster than float32.
template <class Codec>
void expand_all(const uint8_t* panels, int64_t num_rows, int64_t num_k, bf16* out) {
    const int64_t num_groups = num_k / GROUP;
    std::vector<float> panel(num_k * PANEL);
    for (int64_t row = 0; row < num_rows; row++) {
        if (row % PANEL == 0)
            expand<Codec>(panels + row / PANEL * num_groups * Codec::GROUP_BYTES, num_groups, panel.data());
        for (int64_t k = 0; k < num_k; k++) from_float(out + row * num_k + k, panel[k * PANEL + row % PANEL]);
    }
}

template <int P>
using Int4Plain = Int4<false, P>;
template <int P>
using Int4Min = Int4<true, P>;

// `use` is called with a codec of the kind.
template <class F>
void with_codec(int kind, F use) {
    switch (kind) {
        case INT8: use(Int8<1>()); break;
        case INT4: use(Int4Plain<1>()); break;
        case INT4M: use(Int4Min<1>()); break;
        case FLOATS: use(Floats<1>()); break;
        default: use(Halves<1>()); break;
    }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

void baton_linear(int kind, const uint8_t* panels, const float* bias, const float* x, float* out, int64_t num_rows,
                  int64_t num_k, int64_t num_columns, int num_threads) {
    if (!num_rows) return;
    const Product job{panels, bias, x, out, num_rows, num_k, num_columns, num_threads};
    switch (kind) {
        case INT8: product<Int8>(job); break;
        case INT4: product<Int4Plain>(job); break;
        case INT4M: product<Int4Min>(job); break;
        case FLOATS: product<Floats>(job); break;
        default: product<Halves>(job); break;
    }
}

void baton_rows(int kind, const uint8_t* panels, const int64_t* rows, int64_t num_rows, int64_t num_k, float* out) {
    with_codec(kind, [&](auto codec) {
        for (int64_t i = 0; i < num_rows; i++)
            expand_row<decltype(codec)>(panels, num_k, rows[i], out + i * num_k);
    });
}

void baton_expand(int kind, const uint8_t* panels, int64_t num_rows, int64_t num_k, void* out) {
    with_codec(kind, [&](auto codec) { expand_all<decltype(codec)>(panels, num_rows, num_k, (bf16*)out); });
}

}  // extern "C"
