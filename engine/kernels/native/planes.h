// The arithmetic of attention: keys and values of PANEL positions are laid out for products, queries scored against them,
// values mixed by weight.
//
// There are two: in float32, and, where the CPU has dot products of bfloat16 pairs, of bfloat16 keys and values as they
// are: queries are rounded to it, as the keys have been; a weight is cut into two, which keep 16 bits of it. In both, a
// score is a sum over the head's numbers in order and a mix one over positions in order, each in a lane of its own: the
// bits do not depend on how many queries or panels are taken at once.
#pragma once

#include "gemm.h"

namespace baton {

// A square of W x W words, its rows `from` apart, with rows and columns exchanged.
#if defined(__AVX512F__)
inline void exchange(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}
inline void exchange(vf* rows) { exchange((__m512i*)rows); }
#elif defined(__AVX2__)
inline void exchange(vf* rows) {
    __m256 *r = (__m256*)rows, t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int j = 0; j < 4; j++) {
        t[j] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x20);
        t[j + 4] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x31);
    }
    for (int j = 0; j < 8; j++) r[j] = t[j];
}
#else
inline void exchange(vf* rows) {
    for (int i = 0; i < W; i++)
        for (int j = 0; j < i; j++) {
            const float kept = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = kept;
        }
}
#endif

// Asks for a line before its turn, into the second-level cache: more can be under way there.
inline void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// In float32: keys [D][PANEL], values [PANEL][D]. `Dots` below has the same functions.
template <class T>
struct Plain {
    using Element = T;
    using Number = float;  // of what is laid out
    static constexpr int MAX_ROWS = MAX_TILE_ROWS;
    static bool knows(int64_t) { return true; }
    static int64_t size(int64_t dim) { return PANEL * dim; }

    // What `score` wants of queries and `mix` of weights, and what `mix` made: in place.
    static void take_queries(float*, int64_t) {}
    static void take_weights(float*, int64_t) {}
    static void give_mix(float*, int64_t) {}

    // The numbers [PANEL][D] of a panel; `next`: a panel to prefetch, or null.
    static void lay_keys(const T* from, const T* next, int64_t dim, float* to) {
        for (int64_t low = 0; low < PANEL; low += W)
            for (int64_t d = 0; d < dim; d += W) {
                vf rows[W];
                for (int i = 0; i < W; i++) {
                    const int64_t at = (low + i) * dim + d;
                    rows[i] = load(from + at);
                    if (next) prefetch(next + at);
                }
                exchange(rows);
                for (int i = 0; i < W; i++) store(to + (d + i) * PANEL + low, rows[i]);
            }
    }
    static void lay_values(const T* from, const T* next, int64_t dim, float* to) {
        for (int64_t i = 0; i < PANEL * dim; i += W) {
            store(to + i, load(from + i));
            if (next) prefetch(next + i);
        }
    }

    // Scores [R][PANEL], rows `width` apart, of queries [R][D] for a panel of keys.
    template <int R>
    static void score(const float* q, const float* keys, int64_t dim, float* scores, int64_t width) {
        tile<R, false>(q, dim, keys, PANEL, dim, scores, width);
    }

    // Adds N * PANEL columns of the values of `num_positions`, each times its weight, to out, rows D apart.
    template <int R, int N>
    static void mix(const float* weights, int64_t width, const float* values, int64_t num_positions, int64_t dim,
                    float* out) {
        tile<R, true, N * NV>(weights, width, values, dim, num_positions, out, dim);
    }
};

#if defined(__AVX512BF16__)
// By dot products of pairs: keys [D / 2][PANEL] pairs of a key's neighbouring numbers, values [PANEL / 2][D] pairs of a
// column's neighbouring positions, columns in the order in which unpacking leaves them (see give_mix).
struct Dots {
    using Element = bf16;
    using Number = uint32_t;
    static constexpr int MAX_ROWS = 6;
    static constexpr int PAIRED = 2 * W;  // numbers of a register
    static bool knows(int64_t dim) { return dim % PAIRED == 0; }
    static int64_t size(int64_t dim) { return PANEL * dim / 2; }

    // Each 32 floats become as many bfloat16, rounded, in the first half of their place.
    static void take_queries(float* q, int64_t n) {
        for (int64_t i = 0; i < n; i += PAIRED) {
            const __m512 low = _mm512_loadu_ps(q + i), high = _mm512_loadu_ps(q + i + W);
            _mm512_storeu_si512(q + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
    }
    // Each 16 floats become their upper halves as bfloat16, then what is left of them.
    static void take_weights(float* weights, int64_t n) {
        for (float* at = weights; at < weights + n; at += PANEL) {
            const __m512 whole = _mm512_loadu_ps(at);
            const __m256i high = (__m256i)_mm512_cvtneps_pbh(whole);
            const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            _mm256_storeu_si256((__m256i*)at, high);
            _mm256_storeu_si256((__m256i*)(at + PANEL / 2), (__m256i)_mm512_cvtneps_pbh(whole - wide));
        }
    }

    // Unpacking left groups of four apart: those of the lower halves of each eight, then those of the upper.
    static void give_mix(float* out, int64_t dim) {
        float apart[PAIRED];
        for (int64_t d = 0; d < dim; d += PAIRED) {
            std::memcpy(apart, out + d, sizeof apart);
            for (int i = 0; i < PAIRED; i++) out[d + i] = apart[i / 4 % 2 * W + i / 8 * 4 + i % 4];
        }
    }

    static void lay_keys(const bf16* from, const bf16* next, int64_t dim, uint32_t* to) {
        for (int64_t d = 0; d < dim; d += PAIRED, to += W * PANEL) {
            __m512i rows[PANEL];
            for (int i = 0; i < PANEL; i++) {
                rows[i] = _mm512_loadu_si512(from + i * dim + d);
                if (next) prefetch(next + i * dim + d);
            }
            exchange(rows);
            for (int i = 0; i < W; i++) _mm512_storeu_si512(to + i * PANEL, rows[i]);
        }
    }
    static void lay_values(const bf16* from, const bf16* next, int64_t dim, uint32_t* to) {
        for (int64_t s = 0; s < PANEL; s += 2, from += 2 * dim)
            for (int64_t d = 0; d < dim; d += PAIRED, to += PAIRED) {
                const __m512i a = _mm512_loadu_si512(from + d), b = _mm512_loadu_si512(from + dim + d);
                _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
                _mm512_storeu_si512(to + W, _mm512_unpackhi_epi16(a, b));
                if (!next) continue;
                prefetch(next + s * dim + d);
                prefetch(next + (s + 1) * dim + d);
            }
    }

    template <int R>
    static void score(const float* q, const uint32_t* keys, int64_t dim, float* scores, int64_t width) {
        __m512 acc[R] = {};
        for (int64_t d = 0; d < dim; d += PAIRED)
            for (int i = 0; i < W; i++, keys += PANEL) {
                const __m512i key = _mm512_loadu_si512(keys);
                for (int r = 0; r < R; r++) acc[r] = dot(acc[r], pair(q + r * dim + d + i), key);
            }
        for (int r = 0; r < R; r++) _mm512_storeu_ps(scores + r * width, acc[r]);
    }

    template <int R, int N>
    static void mix(const float* weights, int64_t width, const uint32_t* values, int64_t num_positions, int64_t dim,
                    float* out) {
        __m512 acc[R][N];
        for (int r = 0; r < R; r++)
            for (int i = 0; i < N; i++) acc[r][i] = _mm512_loadu_ps(out + r * dim + i * W);
        for (const float* end = weights + num_positions; weights < end; weights += PANEL)
            for (int s = 0; s < PANEL / 2; s++, values += dim) {
                __m512i value[N];
                for (int i = 0; i < N; i++) value[i] = _mm512_loadu_si512(values + i * W);
                for (int r = 0; r < R; r++) {
                    const __m512i high = pair(weights + r * width + s), low = pair(weights + r * width + s + PANEL / 2);
                    for (int i = 0; i < N; i++) acc[r][i] = dot(acc[r][i], high, value[i]);
                    for (int i = 0; i < N; i++) acc[r][i] = dot(acc[r][i], low, value[i]);
                }
            }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < N; i++) _mm512_storeu_ps(out + r * dim + i * W, acc[r][i]);
    }

    static __m512i pair(const float* of) { return _mm512_set1_epi32(load_as<int32_t>(of)); }
};
#else
using Dots = Plain<bf16>;
#endif

}  // namespace baton
