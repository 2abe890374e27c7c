// Attention over paged KV: one layer [N, 2, K, S, D] of the slab, of which a plane [S, D] is contiguous.
//
// Decode: scores of the whole context, one softmax, then the mix; a sequence's numbers depend on nothing but itself.
// Prefill: tiles of queries times blocks of keys with a running softmax (Dao et al., arXiv:2205.14135); keys are
// transposed once per chunk, so that both products are the inner loop of gemm.h.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gemm.h"
#include "planes.h"

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
template <class Planes>
void decode_one(const float* q, const Slab& slab, int64_t low_head, int64_t high_head, const int64_t* blocks,
                int64_t begin, int64_t end, int64_t group, float cap, float* scores, int64_t width, float* out) {
    using T = typename Planes::Element;
    const int64_t dim = slab.head_dim, slots = slab.num_slots, heads = high_head - low_head;
    const int64_t first = begin / slots, last = (end - 1) / slots, origin = first * slots;
    for (int64_t b = first; b <= last; b++)
        for (int64_t h = 0; h < heads; h++) {
            const T* next = b < last ? slab.plane<T>(blocks[b + 1], 0, low_head + h) : nullptr;
            Planes::score(q + h * group * dim, group, slab.plane<T>(blocks[b], 0, low_head + h), next, slots, dim,
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
        Planes::take_weights(row, used);
    }
    for (int64_t b = first; b <= last; b++) {
        const int64_t base = b * slots, low = begin > base ? begin - base : 0;
        const int64_t high = end - base < slots ? end - base : slots;
        for (int64_t h = 0; h < heads; h++) {
            const T* values = slab.plane<T>(blocks[b], 1, low_head + h);
            const T* next = b < last ? slab.plane<T>(blocks[b + 1], 1, low_head + h) : nullptr;
            Planes::mix(scores + h * group * width, width, base - origin, group, values, next, low, high, dim,
                        out + h * group * dim);
        }
    }
}

template <class Planes>
void decode(const Decode& job) {
    using T = typename Planes::Element;
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
            Planes::take_queries(q, size);
            const int64_t begin = job.rule.window && end > job.rule.window ? end - job.rule.window : 0;
            decode_one<Planes>(q, job.slab, head, head + at_once, job.table + seq * job.max_blocks, begin, end, group,
                          job.rule.cap, scores, width, mixed);
            for (int64_t i = 0; i < size; i += dim) Planes::give_mix(mixed + i, dim);
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
    if (!is_bf16)
        decode<Plain<float>>(job);
    else if (Dots::knows(num_slots, head_dim))
        decode<Dots>(job);
    else
        decode<Plain<bf16>>(job);
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
