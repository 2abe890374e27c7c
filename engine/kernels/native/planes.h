// What the attention of a decode does with one plane [S, D] of keys or of values: scores for the queries of a group, and
// the mix of values by weight.
//
// Where the CPU has dot products of bfloat16 pairs, a float32 is cut into two bfloat16 that keep 16 bits of it: that costs
// as many products, but nothing of the plane has to be widened. Numbers are read in the order in which they lie: taking
// a piece of every row first halves what the memory gives.
#pragma once

#include <type_traits>

#include "vec.h"

namespace baton {

// Each lane i of the result: the sum of all lanes of rows[i].
inline vf sums_of(const vf* rows) {
#if defined(__AVX2__)
    __m256 quarters[W / 4];
    for (int i = 0; i < W / 4; i++) {
        __m256 r[4];
        for (int j = 0; j < 4; j++) {
#if defined(__AVX512F__)
            const __m512 wide = (__m512)rows[4 * i + j];
            r[j] = _mm512_castps512_ps256(wide) +
                   _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(wide), 1));
#else
            r[j] = (__m256)rows[4 * i + j];
#endif
        }
        quarters[i] = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
    }
    vf out;
    for (int i = 0; i < W / 4; i += 2) {
        const __m256 low = _mm256_permute2f128_ps(quarters[i], quarters[i + 1], 0x20);
        const __m256 high = _mm256_permute2f128_ps(quarters[i], quarters[i + 1], 0x31);
        const __m256 both = low + high;
        std::memcpy((float*)&out + i * 4, &both, sizeof both);
    }
    return out;
#else
    vf out;
    for (int i = 0; i < W; i++) out[i] = sum(rows[i]);
    return out;
#endif
}

// Asks for `num_elements` before their turn, into the second-level cache: more can be under way there. The next block lies
// apart, where the processor's own prefetching does not follow; asked for as a whole, it would hold up what is computed
// now.
template <class T>
inline void prefetch(const T* from, int64_t num_elements) {
    for (const char *at = (const char*)from, *end = (const char*)(from + num_elements); at < end; at += 64)
        __builtin_prefetch(at, 0, 2);
}

// With each of the first queries of a group, a share of the next plane's W slots from `slot` on.
template <class T>
inline void prefetch_share(const T* next, int64_t slot, int64_t query, int64_t group, int64_t dim) {
    if (!next || query >= 4) return;
    const int64_t part = W / (group < 4 ? group : 4);
    prefetch(next + (slot + query * part) * dim, part * dim);
}

// In float32. `Dots` below has the same functions.
template <class T>
struct Plain {
    using Element = T;
    static bool knows(int64_t, int64_t) { return true; }

    // What the other functions want of queries and of weights, and what they make of the mix: in place.
    static void take_queries(float*, int64_t) {}
    static void take_weights(float*, int64_t) {}
    static void give_mix(float*, int64_t) {}

    // Scores of all `num_slots` keys of a plane, for the queries of a group; `next`: a plane to prefetch, or null.
    static void score(const float* q, int64_t group, const T* keys, const T* next, int64_t num_slots, int64_t dim,
                      float* scores, int64_t width) {
        int64_t s = 0;
        for (; s + W <= num_slots; s += W) {
            const T* row = keys + s * dim;
            for (int64_t g = 0; g < group; g++) {
                vf acc[W] = {};
                prefetch_share(next, s, g, group, dim);
                for (int64_t d = 0; d < dim; d += W) {
                    const vf qd = load(q + g * dim + d);
                    for (int i = 0; i < W; i++) acc[i] = qd * load(row + i * dim + d) + acc[i];
                }
                store(scores + g * width + s, sums_of(acc));
            }
        }
        for (; s < num_slots; s++)
            for (int64_t g = 0; g < group; g++) {
                vf acc{};
                for (int64_t d = 0; d < dim; d += W) acc = load(q + g * dim + d) * load(keys + s * dim + d) + acc;
                scores[g * width + s] = sum(acc);
            }
    }

    // Adds the values of slots [low, high) of a plane to out [group][D], each times the weights of its slot, which are
    // [group][width], slot 0's at `at`.
    static void mix(const float* weights, int64_t width, int64_t at, int64_t group, const T* values, const T* next,
                    int64_t low, int64_t high, int64_t dim, float* out) {
        for (int64_t g = 0; g < group; g++, weights += width, out += dim) {
            for (int64_t s = low / W * W; s < high; s += W) prefetch_share(next, s, g, group, dim);
            int64_t d = 0;
            for (; d + 4 * W <= dim; d += 4 * W) mix_columns<4>(weights + at, values + d, low, high, dim, out + d);
            for (; d < dim; d += W) mix_columns<1>(weights + at, values + d, low, high, dim, out + d);
        }
    }

    template <int N>
    static void mix_columns(const float* weights, const T* values, int64_t low, int64_t high, int64_t dim, float* out) {
        vf acc[N];
        for (int i = 0; i < N; i++) acc[i] = load(out + i * W);
        for (int64_t s = low; s < high; s++) {
            const vf weight = broadcast(weights[s]);
            for (int i = 0; i < N; i++) acc[i] = weight * load(values + s * dim + i * W) + acc[i];
        }
        for (int i = 0; i < N; i++) store(out + i * W, acc[i]);
    }
};

#if defined(__AVX512BF16__)
struct Dots {
    using Element = bf16;
    static constexpr int PAIRED = 2 * W;  // numbers of a register
    static bool knows(int64_t num_slots, int64_t dim) { return num_slots % W == 0 && dim % PAIRED == 0; }

    // Each C floats become their C upper halves, then what is left of them, C lower halves.
    template <int C>
    static void cut(float* numbers, int64_t n) {
        for (int64_t i = 0; i < n; i += C) {
            __m512 whole[C / W];
            for (int j = 0; j < C / W; j++) whole[j] = _mm512_loadu_ps(numbers + i + j * W);
            for (int j = 0; j < C / W; j++) {
                uint16_t* to = (uint16_t*)(numbers + i) + j * W;
                const __m256i high = (__m256i)_mm512_cvtneps_pbh(whole[j]);
                const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
                _mm256_storeu_si256((__m256i*)to, high);
                _mm256_storeu_si256((__m256i*)(to + C), (__m256i)_mm512_cvtneps_pbh(whole[j] - wide));
            }
        }
    }
    static void take_queries(float* q, int64_t n) { cut<PAIRED>(q, n); }
    static void take_weights(float* weights, int64_t n) { cut<W>(weights, n); }

    // Unpacking left groups of four apart: those of the lower halves of each eight, then those of the upper.
    static void give_mix(float* out, int64_t dim) {
        float apart[PAIRED];
        for (int64_t d = 0; d < dim; d += PAIRED) {
            std::memcpy(apart, out + d, sizeof apart);
            for (int i = 0; i < PAIRED; i++) out[d + i] = apart[i / 4 % 2 * W + i / 8 * 4 + i % 4];
        }
    }

    // `use` is called with the number of queries, at most 4, as a constant, and the first of them.
    template <class F>
    static void in_fours(int64_t group, F use) {
        for (int64_t g = 0; g < group; g += 4) switch (group - g) {
                case 1: use(std::integral_constant<int, 1>(), g); break;
                case 2: use(std::integral_constant<int, 2>(), g); break;
                case 3: use(std::integral_constant<int, 3>(), g); break;
                default: use(std::integral_constant<int, 4>(), g);
            }
    }

    static void score(const float* q, int64_t group, const bf16* keys, const bf16* next, int64_t num_slots, int64_t dim,
                      float* scores, int64_t width) {
        in_fours(group, [&](auto size, int64_t g) {
            constexpr int G = size;
            for (int64_t s = 0; s < num_slots; s += W) {
                vf products[G][W];
                for (int i = 0; i < W; i++) {  // key after key, as they lie in memory
                    const bf16* key = keys + (s + i) * dim;
                    if (next && !g) prefetch(next + (s + i) * dim, dim);
                    __m512 acc[G] = {};
                    for (int64_t d = 0; d < dim; d += PAIRED) {
                        const __m512i part = _mm512_loadu_si512(key + d);
                        for (int j = 0; j < G; j++) {
                            const float* query = q + (g + j) * dim + d;
                            acc[j] = dot(acc[j], _mm512_loadu_si512(query), part);
                            acc[j] = dot(acc[j], _mm512_loadu_si512(query + W), part);
                        }
                    }
                    for (int j = 0; j < G; j++) products[j][i] = (vf)acc[j];
                }
                for (int j = 0; j < G; j++) store(scores + (g + j) * width + s, sums_of(products[j]));
            }
        });
    }

    static void mix(const float* weights, int64_t width, int64_t at, int64_t group, const bf16* values,
                    const bf16* next, int64_t low, int64_t high, int64_t dim, float* out) {
        in_fours(group, [&](auto size, int64_t g) {
            constexpr int G = size;
            const float* from = weights + g * width;
            for (int64_t d = 0; d < dim; d += 2 * PAIRED) {
                const bf16* later = next && !g ? next + d : nullptr;
                float* to = out + g * dim + d;
                if (d + 2 * PAIRED <= dim)
                    mix_columns<G, 2>(from, width, at, values + d, later, low, high, dim, to);
                else
                    mix_columns<G, 1>(from, width, at, values + d, later, low, high, dim, to);
            }
        });
    }

    template <int G, int N>
    static void mix_columns(const float* weights, int64_t width, int64_t at, const bf16* values, const bf16* next,
                            int64_t low, int64_t high, int64_t dim, float* out) {
        __m512 acc[G][2 * N];
        for (int g = 0; g < G; g++)
            for (int i = 0; i < 2 * N; i++) acc[g][i] = _mm512_loadu_ps(out + g * dim + i * W);
        for (int64_t s = low & ~1; s < high; s += 2) {  // a weight before `low` is zero
            __m512i halves[2 * N];
            for (int i = 0; i < N; i++) {
                const bf16* value = values + s * dim + i * PAIRED;
                const __m512i a = _mm512_loadu_si512(value);
                const __m512i b = s + 1 < high ? _mm512_loadu_si512(value + dim) : _mm512_setzero_si512();
                halves[2 * i] = _mm512_unpacklo_epi16(a, b);
                halves[2 * i + 1] = _mm512_unpackhi_epi16(a, b);
            }
            for (int64_t i = s; next && i < s + 2; i++) prefetch(next + i * dim, N * PAIRED);
            const float* pairs = weights + (at + s) / W * W + (at + s) % W / 2;  // of a cut register
            for (int g = 0; g < G; g++) {
                const int32_t* pair = (const int32_t*)(pairs + g * width);
                for (int i = 0; i < 2 * N; i++) acc[g][i] = dot(acc[g][i], _mm512_set1_epi32(pair[0]), halves[i]);
                for (int i = 0; i < 2 * N; i++) acc[g][i] = dot(acc[g][i], _mm512_set1_epi32(pair[W / 2]), halves[i]);
            }
        }
        for (int g = 0; g < G; g++)
            for (int i = 0; i < 2 * N; i++) _mm512_storeu_ps(out + g * dim + i * W, acc[g][i]);
    }
};
#else
using Dots = Plain<bf16>;
#endif

}  // namespace baton
