// Products of bfloat16 rows with packed weights (panels.h), where the CPU has dot products of bfloat16 pairs.
//
// A register holds two neighbouring k of 16 columns. Numbers of 4 and 8 bits are exact in bfloat16, so a group's sum over
// q is taken by dot products in float32, then scaled: d * sum(x q) + m * sum(x). Nothing is rounded on the way there but
// the sum itself. Every sum runs over k in order, in a lane of its own: a row has the same bits in every batch.
#include <vector>

#include "panels.h"

using namespace baton;

#if defined(__AVX512BF16__)

namespace baton {
namespace {

constexpr int PAIRS = GROUP / 2;  // of a group
constexpr int LINE = 64;          // bytes that come from memory together
constexpr int MAX_ROWS = 12;      // of a tile: with their sums of a group, 24 registers

inline __m512i load_pairs(const void* from) { return _mm512_loadu_si512(from); }
inline __m512 half_floats(const uint8_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

// The bfloat16 of n - zero for each nibble n. A lane of vpermw looks at five bits of its index, of which the fifth belongs
// to the next nibble: hence twice.
inline __m512i nibble_table(int zero) {
    alignas(64) uint16_t table[32];
    for (int i = 0; i < 32; i++) {
        bf16 number;
        from_float(&number, float((i & 15) - zero));
        table[i] = number.bits;
    }
    return load_pairs(table);
}

template <bool HAS_MIN>
struct Int4 {
    static constexpr bool IS_SCALED = true, IS_SPLIT = true, HAS_MINIMUM = HAS_MIN;
    static constexpr int64_t GROUP_BYTES = group_bytes(HAS_MIN ? INT4M : INT4);
    __m512i table = nibble_table(HAS_MIN ? 0 : 8);
    __m512i pairs(const uint8_t* group, int t) const {
        const __m512i words = load_pairs(group + (HAS_MIN ? 4 : 2) * PANEL + t / 4 * PANEL * 4);
        return _mm512_permutexvar_epi16(_mm512_srli_epi32(words, t % 4 * 4), table);
    }
};

struct Int8 {
    static constexpr bool IS_SCALED = true, IS_SPLIT = false, HAS_MINIMUM = false;
    static constexpr int64_t GROUP_BYTES = group_bytes(INT8);
    __m512i pairs(const uint8_t* group, int t) const {  // the upper half of a small whole number in float32 is all of it
        const int8_t* q = (const int8_t*)group + 2 * PANEL + 2 * t * PANEL;
        const __m512i low = (__m512i)int8_to_float(q), high = (__m512i)int8_to_float(q + PANEL);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
    }
};

struct Numbers {
    static constexpr bool IS_SCALED = false, IS_SPLIT = false, HAS_MINIMUM = false;
    static constexpr int64_t GROUP_BYTES = group_bytes(HALVES);
    __m512i pairs(const uint8_t* group, int t) const { return load_pairs(group + t * PANEL * 4); }
};

struct Product {
    const uint8_t* panels;
    const float* bias;
    const uint32_t* x;  // of each tile of rows [groups][its rows][PAIRS], pairs in the order of the codec
    const float* sums;  // of each tile of rows [groups][its rows] of x, for minimums
    float* out;
    int64_t num_rows, num_groups, num_columns;
    int num_threads;
};

// Rows [low, low + R) times panels [p, p + P).
template <class Codec, int R, int P>
void tile(const Product& job, const Codec& codec, int64_t low, int64_t p) {
    const int64_t panel_bytes = job.num_groups * Codec::GROUP_BYTES;
    const uint8_t* group = job.panels + p * panel_bytes;
    const uint32_t* x = job.x + low * job.num_groups * PAIRS;
    const float* sums = job.sums + low * job.num_groups;
    __m512 acc[R][P] = {};
    for (int64_t g = 0; g < job.num_groups; g++, group += Codec::GROUP_BYTES, x += R * PAIRS, sums += R) {
        __m512 of_group[R][P] = {};
        auto& into = Codec::IS_SCALED ? of_group : acc;
#pragma GCC unroll 16
        for (int t = 0; t < PAIRS; t++) {
            __m512i w[P];
            for (int i = 0; i < P; i++) {
                w[i] = codec.pairs(group + i * panel_bytes, t);
                // The panels after these: each is too short for the processor's own prefetching to get far.
                if (t * LINE < Codec::GROUP_BYTES) __builtin_prefetch(group + (P + i) * panel_bytes + t * LINE, 0, 2);
            }
            for (int r = 0; r < R; r++) {
                const __m512i xr = _mm512_set1_epi32(x[r * PAIRS + t]);
                for (int i = 0; i < P; i++) into[r][i] = dot(into[r][i], xr, w[i]);
            }
        }
        if (Codec::IS_SCALED)
            for (int i = 0; i < P; i++) {
                const __m512 d = half_floats(group + i * panel_bytes);
                for (int r = 0; r < R; r++) acc[r][i] = d * of_group[r][i] + acc[r][i];
                if (Codec::HAS_MINIMUM) {
                    const __m512 m = half_floats(group + i * panel_bytes + 2 * PANEL);
                    for (int r = 0; r < R; r++)
                        acc[r][i] = m * _mm512_set1_ps(sums[r]) + acc[r][i];
                }
            }
    }
    for (int i = 0; i < P; i++) {
        const int64_t column = (p + i) * PANEL, left = job.num_columns - column;
        const __mmask16 mask = left < PANEL ? (1u << left) - 1 : 0xffff;
        const __m512 bias = job.bias ? _mm512_maskz_loadu_ps(mask, job.bias + column) : _mm512_setzero_ps();
        for (int r = 0; r < R; r++)
            _mm512_mask_storeu_ps(job.out + (low + r) * job.num_columns + column, mask, acc[r][i] + bias);
    }
}

// Few rows take more panels at once, so that there are enough sums that do not wait for each other.
constexpr int panels_at_once(int rows, bool is_scaled) { return rows == 1 ? 4 : rows <= 6 || !is_scaled ? 2 : 1; }

constexpr int64_t STRIP = 4;  // panels that all rows go over before the next: they stay in the second-level cache

template <class Codec>
void product(const Product& job) {
    const Codec codec;
    const int64_t num_panels = (job.num_columns + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(job.num_threads) if (job.num_threads > 1)
    for (int64_t p = 0; p < num_panels; p += STRIP) {
        const int64_t end = p + STRIP < num_panels ? p + STRIP : num_panels;
        in_tiles<MAX_ROWS>(job.num_rows, [&](auto rows, int64_t low) {
            constexpr int R = rows, P = panels_at_once(R, Codec::IS_SCALED);
            int64_t at = p;
            for (; at + P <= end; at += P) tile<Codec, R, P>(job, codec, low, at);
            for (; at < end; at++) tile<Codec, R, 1>(job, codec, low, at);
        });
    }
}

// The order in which a codec's pairs stand in a register: of eight numbers, 0 and 4, then 1 and 5, ..., as nibbles stand
// in the halves of a word; or as they are.
inline __m512i pair_order(bool is_split) {
    alignas(64) uint16_t order[GROUP];
    for (int i = 0; i < GROUP; i++) order[i] = is_split ? i / 8 * 8 + i % 8 / 2 + i % 2 * 4 : i;
    return load_pairs(order);
}

// x [rows][num_k] as `Product` has it: what a tile multiplies in turn lies in a row.
template <class Codec>
void product(Product job, const bf16* x, int64_t num_k) {
    const __m512i order = pair_order(Codec::IS_SPLIT);
    const int64_t num_groups = job.num_groups;
    std::vector<uint32_t> pairs(job.num_rows * num_groups * PAIRS);
    std::vector<float> sums(Codec::HAS_MINIMUM ? job.num_rows * num_groups : 0);
    in_tiles<MAX_ROWS>(job.num_rows, [&](auto rows, int64_t low) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t g = 0, at = low * num_groups + r; g < num_groups; g++, at += rows) {
                const bf16* from = x + (low + r) * num_k + g * GROUP;
                _mm512_storeu_si512(&pairs[at * PAIRS], _mm512_permutexvar_epi16(order, load_pairs(from)));
                if (Codec::HAS_MINIMUM) sums[at] = sum(load(from) + load(from + W));
            }
    });
    job.x = pairs.data();
    job.sums = sums.data();
    product<Codec>(job);
}

}  // namespace
}  // namespace baton

#endif

extern "C" {

int baton_has_dot() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

int baton_has_tiles() {
#if defined(__AMX_BF16__)
    return 1;
#else
    return 0;
#endif
}

// As baton_linear, of x in bfloat16; only where baton_has_dot, and not of floats.
void baton_linear_dot(int kind, const uint8_t* panels, const float* bias, const void* x, float* out, int64_t num_rows,
                      int64_t num_k, int64_t num_columns, int num_threads) {
#if defined(__AVX512BF16__)
    const Product job{panels, bias, nullptr, nullptr, out, num_rows, num_k / GROUP, num_columns, num_threads};
    const bf16* rows = (const bf16*)x;
    switch (kind) {
        case INT8: return product<Int8>(job, rows, num_k);
        case INT4: return product<Int4<false>>(job, rows, num_k);
        case INT4M: return product<Int4<true>>(job, rows, num_k);
        default: return product<Numbers>(job, rows, num_k);
    }
#endif
}

}  // extern "C"
