// Attention over paged KV: one layer [N, 2, K, S, D] of the slab, of which a plane [S, D] is contiguous.
//
// Decode: scores of the whole context, one softmax, then the mix; a sequence's numbers depend on nothing but itself.
// Prefill: tiles of queries times blocks of keys with a running softmax (Dao et al., arXiv:2205.14135); keys are
// transposed once per chunk, so that both products are the inner loop of gemm.h.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gemm.h"

namespace baton {
namespace {

constexpr int64_t MAX_TILE_QUERIES = 48;  // rows of one tile: queries times the heads that share a key
constexpr int64_t KEY_BLOCK = 256;
constexpr float LOWEST = -1e30f;  // stands for minus infinity: what is hidden

struct Slab {
    const void* data;  // of the layer
    int64_t block_stride, num_kv_heads, num_slots, head_dim;  // the stride in elements
    template <class T>
    const T* plane(int64_t block, int side, int64_t head) const {
        return (const T*)data + block * block_stride + (side * num_kv_heads + head) * num_slots * head_dim;
    }
};

struct Rule {
    float scale, cap;  // cap 0: none
    int64_t window;    // 0: none
};

inline vf capped(vf score, float cap) { return cap > 0 ? tanh(score / cap) * cap : score; }

// scores [n] -> weights whose sum is returned; hidden ones become 0. n is a multiple of W.
float softmax(float* scores, int64_t n, float max_score) {
    vf total{};
    for (int64_t i = 0; i < n; i += W) {
        const vf s = load(scores + i);
        const vf p = s > LOWEST ? exp(s - max_score) : vf{};
        total += p;
        store(scores + i, p);
    }
    return sum(total);
}

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

// Asks for `num_elements` before their turn. A plane lies apart from the next, where the processor's own prefetching
// does not follow; asked for as a whole, it would hold up what is computed now.
template <class T>
inline void prefetch(const T* from, int64_t num_elements) {
    for (const char *at = (const char*)from, *end = (const char*)(from + num_elements); at < end; at += 64)
        __builtin_prefetch(at);
}

// Scores of all `num_slots` keys of a plane, for the queries of a group; `next`: the plane after it.
template <class T>
inline void score_plane(const float* q, int64_t group, const T* keys, const T* next, int64_t num_slots, int64_t dim,
                        float* scores, int64_t width) {
    int64_t s = 0;
    for (; s + W <= num_slots; s += W) {
        const T* row = keys + s * dim;
        for (int64_t g = 0; g < group; g++) {
            vf acc[W] = {};
            if (next && g < 4) {  // a share of it with each query
                const int64_t part = W / (group < 4 ? group : 4);
                prefetch(next + (s + g * part) * dim, part * dim);
            }
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

// Adds the values of slots [low, high) of a plane, weighted, to out [D].
template <class T>
inline void mix_plane(const float* weights, const T* values, int64_t low, int64_t high, int64_t dim, float* out) {
    int64_t d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) {
        vf acc[4];
        for (int i = 0; i < 4; i++) acc[i] = load(out + d + i * W);
        for (int64_t s = low; s < high; s++) {
            const vf weight = broadcast(weights[s]);
            for (int i = 0; i < 4; i++) acc[i] = weight * load(values + s * dim + d + i * W) + acc[i];
        }
        for (int i = 0; i < 4; i++) store(out + d + i * W, acc[i]);
    }
    for (; d < dim; d += W) {
        vf acc = load(out + d);
        for (int64_t s = low; s < high; s++) acc = broadcast(weights[s]) * load(values + s * dim + d) + acc;
        store(out + d, acc);
    }
}

struct Decode {
    const float* q;  // [T, H, D]
    Slab slab;
    const int64_t *rows, *table, *lens;  // [B], [B, max_blocks], [B]
    int64_t num_seqs, max_blocks, num_heads;
    Rule rule;
    void* out;  // [T, H, D]
    int num_threads;
};

// One sequence, kv heads [low, high): q [heads, G, D] scaled, the context's positions [begin, end), out as q.
// scores [heads][G][whole blocks, rounded up to registers]. Heads of a block are neighbours in memory, so they are
// taken together.
template <class T>
void decode_one(const float* q, const Slab& slab, int64_t low_head, int64_t high_head, const int64_t* blocks,
                int64_t begin, int64_t end, int64_t group, float cap, float* scores, int64_t width, float* out) {
    const int64_t dim = slab.head_dim, slots = slab.num_slots, heads = high_head - low_head;
    const int64_t first = begin / slots, last = (end - 1) / slots, origin = first * slots;
    for (int64_t b = first; b <= last; b++)
        for (int64_t h = 0; h < heads; h++) {
            const T* next = b < last ? slab.plane<T>(blocks[b + 1], 0, low_head + h) : nullptr;
            score_plane(q + h * group * dim, group, slab.plane<T>(blocks[b], 0, low_head + h), next, slots, dim,
                        scores + h * group * width + b * slots - origin, width);
        }
    for (int64_t g = 0; g < heads * group; g++) {
        float *row = scores + g * width, *to = out + g * dim;
        for (int64_t i = 0; i < begin - origin; i++) row[i] = LOWEST;
        const int64_t used = (end - origin + W - 1) / W * W;
        for (int64_t i = end - origin; i < used; i++) row[i] = LOWEST;
        vf best = broadcast(LOWEST);
        for (int64_t i = 0; i < used; i += W) {
            vf s = load(row + i);
            if (cap > 0) store(row + i, s = s > LOWEST ? capped(s, cap) : s);
            best = max(best, s);
        }
        const float total = softmax(row, used, largest(best));
        for (int64_t d = 0; d < dim; d++) to[d] = 0;
        for (int64_t i = 0; i < used; i += W) store(row + i, load(row + i) / total);
    }
    for (int64_t b = first; b <= last; b++) {
        const int64_t base = b * slots, low = begin > base ? begin - base : 0;
        const int64_t high = end - base < slots ? end - base : slots;
        for (int64_t h = 0; h < heads; h++) {
            const T* values = slab.plane<T>(blocks[b], 1, low_head + h);
            const T* next = b < last ? slab.plane<T>(blocks[b + 1], 1, low_head + h) : nullptr;
            for (int64_t g = 0; g < group; g++) {
                const int64_t part = slots / (group < 4 ? group : 4);
                if (next && g < 4) prefetch(next + g * part * dim, part * dim);
                const int64_t at = h * group + g;
                mix_plane(scores + at * width + base - origin, values, low, high, dim, out + at * dim);
            }
        }
    }
}

template <class T>
void decode(const Decode& job) {
    const int64_t dim = job.slab.head_dim, heads = job.slab.num_kv_heads, group = job.num_heads / heads;
    const int64_t width = (job.max_blocks * job.slab.num_slots + W - 1) / W * W;
    const int64_t at_once = job.num_seqs < job.num_threads ? 1 : heads, parts = heads / at_once;
#pragma omp parallel num_threads(job.num_threads) if (job.num_threads > 1)
    {
        std::vector<float> scratch(at_once * group * (width + 2 * dim));
        float *q = scratch.data(), *mixed = q + at_once * group * dim, *scores = mixed + at_once * group * dim;
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < job.num_seqs * parts; unit++) {
            const int64_t seq = unit / parts, head = unit % parts * at_once;
            const int64_t capacity = job.max_blocks * job.slab.num_slots, size = at_once * group * dim;
            const int64_t end = job.lens[seq] < capacity ? job.lens[seq] : capacity;
            const int64_t at = (job.rows[seq] * job.num_heads + head * group) * dim;
            for (int64_t i = 0; i < size; i++) q[i] = job.q[at + i] * job.rule.scale;
            const int64_t begin = job.rule.window && end > job.rule.window ? end - job.rule.window : 0;
            decode_one<T>(q, job.slab, head, head + at_once, job.table + seq * job.max_blocks, begin, end, group,
                          job.rule.cap, scores, width, mixed);
            for (int64_t i = 0; i < size; i++) from_float((T*)job.out + at + i, mixed[i]);
        }
    }
}

struct Prefill {
    const float* q;  // [T, H, D]
    Slab slab;
    const int64_t* blocks;
    int64_t num_tokens, num_heads, start;
    Rule rule;
    void* out;  // [T, H, D]
    int num_threads;
};

// Keys of positions [origin, end) as [ceil / PANEL][D][PANEL], values as [positions][D]; what nobody sees is zero.
template <class T>
void gather(const Prefill& job, int64_t head, int64_t origin, int64_t begin, int64_t end, float* keys, float* values) {
    const int64_t dim = job.slab.head_dim, slots = job.slab.num_slots;
    const int64_t padded = (end - origin + PANEL - 1) / PANEL * PANEL;
#pragma omp parallel for num_threads(job.num_threads) if (job.num_threads > 1)
    for (int64_t i = 0; i < padded; i++) {
        const int64_t at = origin + i;
        float *column = keys + i / PANEL * dim * PANEL + i % PANEL, *row = values + i * dim;
        if (at < begin || at >= end) {
            for (int64_t d = 0; d < dim; d++) column[d * PANEL] = row[d] = 0;
            continue;
        }
        const T* key = job.slab.plane<T>(job.blocks[at / slots], 0, head) + at % slots * dim;
        const T* value = job.slab.plane<T>(job.blocks[at / slots], 1, head) + at % slots * dim;
        for (int64_t d = 0; d < dim; d++) column[d * PANEL] = to_float(key[d]);
        for (int64_t d = 0; d < dim; d += W) store(row + d, load(value + d));
    }
}

struct Tile {
    std::vector<float> q, scores, mixed, best, total;
    Tile(int64_t rows, int64_t dim)
        : q(rows * dim), scores(rows * KEY_BLOCK), mixed(rows * dim), best(rows), total(rows) {}
};

// One block of keys for the queries of a tile: running maximum, sum and mix are brought up to date.
void attend_block(Tile& tile, int64_t rows, int64_t dim, int64_t group, const float* keys, const float* values,
                  int64_t low, int64_t width, int64_t first_query, const Rule& rule) {
    for (int64_t p = 0; p < width; p += PANEL)
        panel_product<false>(tile.q.data(), dim, rows, keys + p * dim, PANEL, dim, tile.scores.data() + p, KEY_BLOCK);
    for (int64_t r = 0; r < rows; r++) {
        float* row = tile.scores.data() + r * KEY_BLOCK;
        const int64_t query = first_query + r / group;
        const int64_t begin = rule.window ? query - rule.window + 1 - low : 0, end = query + 1 - low;
        for (int64_t i = 0; i < begin && i < width; i++) row[i] = LOWEST;
        for (int64_t i = end > 0 ? end : 0; i < width; i++) row[i] = LOWEST;
        vf best = broadcast(LOWEST);
        for (int64_t i = 0; i < width; i += W) {
            vf s = load(row + i);
            if (rule.cap > 0) store(row + i, s = s > LOWEST ? capped(s, rule.cap) : s);
            best = max(best, s);
        }
        const float now = std::fmax(tile.best[r], largest(best));
        const float kept = tile.best[r] > LOWEST ? std::exp(tile.best[r] - now) : 0.0f;
        tile.total[r] = tile.total[r] * kept + softmax(row, width, now);
        tile.best[r] = now;
        if (kept != 1.0f)
            for (int64_t d = 0; d < dim; d += W)
                store(&tile.mixed[r * dim + d], load(&tile.mixed[r * dim + d]) * kept);
    }
    for (int64_t d = 0; d < dim; d += PANEL)
        panel_product<true>(tile.scores.data(), KEY_BLOCK, rows, values + d, dim, width, tile.mixed.data() + d, dim);
}

template <class T>
void prefill(const Prefill& job) {
    const int64_t dim = job.slab.head_dim, heads = job.slab.num_kv_heads, group = job.num_heads / heads;
    const int64_t end = job.start + job.num_tokens, window = job.rule.window;
    const int64_t begin = window && job.start >= window ? job.start - window + 1 : 0;
    const int64_t origin = begin / KEY_BLOCK * KEY_BLOCK;
    const int64_t padded = (end - origin + PANEL - 1) / PANEL * PANEL;
    const int64_t queries = group < MAX_TILE_QUERIES ? MAX_TILE_QUERIES / group : 1;
    std::vector<float> keys(padded * dim), values(padded * dim);
    for (int64_t head = 0; head < heads; head++) {
        gather<T>(job, head, origin, begin, end, keys.data(), values.data());
#pragma omp parallel num_threads(job.num_threads) if (job.num_threads > 1)
        {
            Tile tile(queries * group, dim);
#pragma omp for schedule(dynamic)
            for (int64_t low = 0; low < job.num_tokens; low += queries) {
                const int64_t count = low + queries < job.num_tokens ? queries : job.num_tokens - low;
                const int64_t rows = count * group, first = job.start + low, last = first + count;
                for (int64_t t = 0; t < count; t++) {
                    const float* from = job.q + ((low + t) * job.num_heads + head * group) * dim;
                    for (int64_t i = 0; i < group * dim; i++) tile.q[t * group * dim + i] = from[i] * job.rule.scale;
                }
                std::fill(tile.mixed.begin(), tile.mixed.end(), 0.0f);
                std::fill(tile.best.begin(), tile.best.end(), LOWEST);
                std::fill(tile.total.begin(), tile.total.end(), 0.0f);
                const int64_t seen = window && first >= window ? first - window + 1 : 0;
                for (int64_t at = seen / KEY_BLOCK * KEY_BLOCK; at < last; at += KEY_BLOCK) {
                    const int64_t wide = last - at < KEY_BLOCK ? (last - at + PANEL - 1) / PANEL * PANEL : KEY_BLOCK;
                    attend_block(tile, rows, dim, group, keys.data() + (at - origin) * dim,
                                 values.data() + (at - origin) * dim, at, wide, first, job.rule);
                }
                for (int64_t r = 0; r < rows; r++) {
                    T* to = (T*)job.out + ((low + r / group) * job.num_heads + head * group + r % group) * dim;
                    for (int64_t d = 0; d < dim; d++) from_float(to + d, tile.mixed[r * dim + d] / tile.total[r]);
                }
            }
        }
    }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// q and out [T, H, D], q float32, out of the slab's type; rows [B] of them; table [B, max_blocks]; lens [B].
void baton_decode_attention(int is_bf16, const float* q, const void* layer, int64_t block_stride, int64_t num_kv_heads,
                            int64_t num_slots, int64_t head_dim, const int64_t* rows, const int64_t* table,
                            const int64_t* lens, int64_t num_seqs, int64_t max_blocks, int64_t num_heads, float scale,
                            float cap, int64_t window, void* out, int num_threads) {
    const Slab slab{layer, block_stride, num_kv_heads, num_slots, head_dim};
    const Decode job{q,         slab,       rows, table, lens, num_seqs, max_blocks, num_heads,
                     {scale, cap, window}, out,  num_threads};
    is_bf16 ? decode<bf16>(job) : decode<float>(job);
}

// q and out [T, H, D] at positions start, start + 1, ...; blocks: of the one sequence.
void baton_prefill_attention(int is_bf16, const float* q, const void* layer, int64_t block_stride,
                             int64_t num_kv_heads, int64_t num_slots, int64_t head_dim, const int64_t* blocks,
                             int64_t num_tokens, int64_t num_heads, int64_t start, float scale, float cap,
                             int64_t window, void* out, int num_threads) {
    const Slab slab{layer, block_stride, num_kv_heads, num_slots, head_dim};
    const Prefill job{q, slab, blocks, num_tokens, num_heads, start, {scale, cap, window}, out, num_threads};
    is_bf16 ? prefill<bf16>(job) : prefill<float>(job);
}

}  // extern "C"
