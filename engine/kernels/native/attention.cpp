// Attention over paged KV: one layer [N, 2, K, S, D] of the slab, of which a plane [S, D] is contiguous.
//
// Keys are taken in blocks that begin at fixed positions, with a running softmax (Dao et al., arXiv:2205.14135). A prompt
// has all keys laid out once, for its tiles of queries; a decode lays out one panel after the other, as it goes through
// memory. What is done to a query is the same: its bits depend on nothing but itself and its context, be it a token of a
// prompt, however that was cut, or of an answer.
#include <algorithm>
#include <cmath>
#include <vector>

#include "planes.h"

namespace baton {
namespace {

constexpr int64_t MAX_TILE_QUERIES = 48;  // rows of one tile: queries times the heads that share a key
constexpr int64_t KEY_BLOCK = 256;
constexpr int MAX_SUMS = NV == 1 ? 24 : 12;  // registers of a mix: with so many, a weight is loaded for several sums
constexpr float LOWEST = -1e30f;  // stands for minus infinity: what is hidden

struct Slab {
    const void* data;  // of the layer
    int64_t block_stride, num_kv_heads, num_slots, head_dim;  // the stride in elements
    template <class T>
    const T* plane(int64_t block, int side, int64_t head) const {
        return (const T*)data + block * block_stride + (side * num_kv_heads + head) * num_slots * head_dim;
    }
};

// What of one sequence is seen: positions [begin, end) of its blocks, keys or values of one head.
template <class T>
struct Context {
    const Slab& slab;
    const int64_t* blocks;
    int64_t begin, end;

    // Where the numbers of a panel lie, if they do as [PANEL][D]; else null.
    const T* place(int64_t position, int side, int64_t head) const {
        const int64_t slot = position % slab.num_slots;
        if (position < begin || position + PANEL > end || slot + PANEL > slab.num_slots) return nullptr;
        return row(position, side, head);
    }
    const T* row(int64_t position, int side, int64_t head) const {
        const int64_t slots = slab.num_slots;
        return slab.plane<T>(blocks[position / slots], side, head) + position % slots * slab.head_dim;
    }
    // A copy of the numbers of a panel, zero where nothing is seen.
    const T* copy(int64_t position, int side, int64_t head, T* to) const {
        for (int64_t i = 0; i < PANEL; i++, to += slab.head_dim) {
            const bool is_seen = position + i >= begin && position + i < end;
            is_seen ? std::memcpy(to, row(position + i, side, head), slab.head_dim * sizeof(T))
                    : std::memset(to, 0, slab.head_dim * sizeof(T));
        }
        return to - PANEL * slab.head_dim;
    }
};

template <class A>
void lay_out(const Context<typename A::Element>& context, int64_t position, int side, int64_t head,
             const typename A::Element* next, typename A::Element* spare, typename A::Number* to) {
    const auto* from = context.place(position, side, head);
    if (!from) from = context.copy(position, side, head, spare);
    side ? A::lay_values(from, next, context.slab.head_dim, to) : A::lay_keys(from, next, context.slab.head_dim, to);
}

struct Rule {
    float scale, cap;  // cap 0: none
    int64_t window;    // 0: none
};

inline vf capped(vf score, float cap) { return tanh(score / cap) * cap; }

// What rows of queries know so far: the best score, and under it the sum of weights and the values mixed by them.
struct Running {
    std::vector<float> q, mixed, scores, best, total;  // [rows][D], [rows][D], [rows][KEY_BLOCK], [rows], [rows]
    Running(int64_t rows, int64_t dim)
        : q(rows * dim), mixed(rows * dim), scores(rows * KEY_BLOCK), best(rows), total(rows) {}

    void begin() {
        std::fill(mixed.begin(), mixed.end(), 0.0f);
        std::fill(best.begin(), best.end(), LOWEST);
        std::fill(total.begin(), total.end(), 0.0f);
    }
};

// The scores of a row, of which `width` are computed and [begin, end) seen, become weights.
void weigh(Running& running, int64_t r, int64_t begin, int64_t end, int64_t width, int64_t dim, float cap) {
    float *row = &running.scores[r * KEY_BLOCK], *mixed = &running.mixed[r * dim];
    for (int64_t i = 0; i < begin && i < width; i++) row[i] = LOWEST;
    for (int64_t i = end > 0 ? end : 0; i < width; i++) row[i] = LOWEST;
    vf best = broadcast(LOWEST);
    for (int64_t i = 0; i < width; i += W) {
        vf s = load(row + i);
        if (cap > 0) store(row + i, s = s > LOWEST ? capped(s, cap) : s);
        best = max(best, s);
    }
    const float before = running.best[r], now = std::fmax(before, largest(best));
    const float kept = before > LOWEST ? std::exp(before - now) : 0.0f;
    vf total{};
    for (int64_t i = 0; i < width; i += W) {
        const vf s = load(row + i);
        const vf weight = s > LOWEST ? exp(s - now) : vf{};
        total += weight;
        store(row + i, weight);
    }
    running.total[r] = running.total[r] * kept + sum(total);
    running.best[r] = now;
    if (kept != 1.0f)
        for (int64_t d = 0; d < dim; d += W) store(mixed + d, load(mixed + d) * kept);
}

// Rows [first, first + num_rows) and a panel of keys, whose scores stand from `at` on.
template <class A>
void score(Running& running, int64_t first, int64_t num_rows, const typename A::Number* keys, int64_t dim, int64_t at) {
    in_tiles<A::MAX_ROWS>(num_rows, [&](auto rows, int64_t low) {
        A::template score<rows>(&running.q[(first + low) * dim], keys, dim,
                                &running.scores[(first + low) * KEY_BLOCK + at], KEY_BLOCK);
    });
}

// Rows as above, and the values of `num_positions` whose weights stand from `at` on.
template <class A>
void mix(Running& running, int64_t first, int64_t num_rows, const typename A::Number* values, int64_t num_positions,
         int64_t dim, int64_t at) {
    in_tiles<A::MAX_ROWS>(num_rows, [&](auto rows, int64_t low) {
        constexpr int R = rows, SUMS = MAX_SUMS / (R * NV), N = SUMS >= 4 ? 4 : SUMS >= 2 ? 2 : 1;
        const float* weights = &running.scores[(first + low) * KEY_BLOCK + at];
        float* out = &running.mixed[(first + low) * dim];
        int64_t d = 0;
        for (; d + N * PANEL <= dim; d += N * PANEL)
            A::template mix<R, N>(weights, KEY_BLOCK, values + d, num_positions, dim, out + d);
        for (; d < dim; d += PANEL)
            A::template mix<R, 1>(weights, KEY_BLOCK, values + d, num_positions, dim, out + d);
    });
}

template <class A>
void give(Running& running, int64_t r, int64_t dim, typename A::Element* to) {
    float* mixed = &running.mixed[r * dim];
    A::give_mix(mixed, dim);
    for (int64_t d = 0; d < dim; d++) from_float(to + d, mixed[d] / running.total[r]);
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

// One sequence, kv heads [low, high): heads of a block are neighbours in memory, so they are taken together.
template <class A>
void decode_one(const Context<typename A::Element>& context, int64_t low_head, int64_t high_head, int64_t group,
                float cap, typename A::Element* spare, typename A::Number* panel, Running& running) {
    const int64_t dim = context.slab.head_dim, end = context.end, rows = (high_head - low_head) * group;
    for (int64_t low = context.begin / KEY_BLOCK * KEY_BLOCK; low < end; low += KEY_BLOCK) {
        const int64_t high = std::min(low + KEY_BLOCK, (end + PANEL - 1) / PANEL * PANEL);
        for (int side = 0; side < 2; side++) {
            for (int64_t at = low; at < high; at += PANEL) {
                // What is read after it: keys, then their values, then the next keys.
                const bool is_last = at + PANEL >= high;
                const int64_t after = !is_last ? at + PANEL : side ? high : low;
                for (int64_t h = low_head; h < high_head; h++) {
                    const int64_t first = (h - low_head) * group;
                    const auto* next = context.place(after, is_last ? !side : side, h);
                    lay_out<A>(context, at, side, h, next, spare, panel);
                    side ? mix<A>(running, first, group, panel, PANEL, dim, at - low)
                         : score<A>(running, first, group, panel, dim, at - low);
                }
            }
            for (int64_t r = 0; r < rows && !side; r++) {
                weigh(running, r, context.begin - low, end - low, high - low, dim, cap);
                A::take_weights(&running.scores[r * KEY_BLOCK], high - low);
            }
        }
    }
}

template <class A>
void decode(const Decode& job) {
    using T = typename A::Element;
    const int64_t dim = job.slab.head_dim, heads = job.slab.num_kv_heads, group = job.num_heads / heads;
    const int64_t at_once = job.num_seqs < job.num_threads ? 1 : heads, parts = heads / at_once;
#pragma omp parallel num_threads(job.num_threads) if (job.num_threads > 1)
    {
        Running running(at_once * group, dim);
        std::vector<typename A::Number> panel(A::size(dim));
        std::vector<T> spare(PANEL * dim);
#pragma omp for schedule(dynamic)
        for (int64_t unit = 0; unit < job.num_seqs * parts; unit++) {
            const int64_t seq = unit / parts, head = unit % parts * at_once;
            const int64_t capacity = job.max_blocks * job.slab.num_slots, size = at_once * group * dim;
            const int64_t end = std::min(job.lens[seq], capacity);
            const int64_t begin = job.rule.window && end > job.rule.window ? end - job.rule.window : 0;
            const int64_t at = (job.rows[seq] * job.num_heads + head * group) * dim;
            running.begin();
            for (int64_t i = 0; i < size; i++) running.q[i] = job.q[at + i] * job.rule.scale;
            A::take_queries(running.q.data(), size);
            decode_one<A>({job.slab, job.table + seq * job.max_blocks, begin, end}, head, head + at_once, group,
                          job.rule.cap, spare.data(), panel.data(), running);
            for (int64_t r = 0; r < at_once * group; r++) give<A>(running, r, dim, (T*)job.out + at + r * dim);
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

// The keys of positions [at, at + width) for the queries of a tile, the first of which is at `first`.
template <class A>
void attend_block(Running& running, int64_t rows, int64_t dim, int64_t group, const typename A::Number* keys,
                  const typename A::Number* values, int64_t at, int64_t width, int64_t first, const Rule& rule) {
    for (int64_t p = 0; p < width / PANEL; p++)
        score<A>(running, 0, rows, keys + p * A::size(dim), dim, p * PANEL);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t query = first + r / group;
        const int64_t begin = rule.window ? query - rule.window + 1 - at : 0;
        weigh(running, r, begin, query + 1 - at, width, dim, rule.cap);
        A::take_weights(&running.scores[r * KEY_BLOCK], width);
    }
    mix<A>(running, 0, rows, values, width, dim, 0);
}

template <class A>
void prefill(const Prefill& job) {
    using T = typename A::Element;
    const int64_t dim = job.slab.head_dim, heads = job.slab.num_kv_heads, group = job.num_heads / heads;
    const int64_t end = job.start + job.num_tokens, window = job.rule.window;
    const int64_t begin = window && job.start >= window ? job.start - window + 1 : 0;
    const int64_t origin = begin / KEY_BLOCK * KEY_BLOCK, num_panels = (end - origin + PANEL - 1) / PANEL;
    const int64_t queries = group < MAX_TILE_QUERIES ? MAX_TILE_QUERIES / group : 1, panel = A::size(dim);
    const Context<T> context{job.slab, job.blocks, begin, end};
    std::vector<typename A::Number> sides[2];
    for (auto& side : sides) side.resize(num_panels * panel);
#pragma omp parallel num_threads(job.num_threads) if (job.num_threads > 1)
    {
        Running running(queries * group, dim);
        std::vector<T> spare(PANEL * dim);
        for (int64_t head = 0; head < heads; head++) {
#pragma omp for schedule(static)
            for (int64_t p = 0; p < num_panels; p++)
                for (int side = 0; side < 2; side++)
                    lay_out<A>(context, origin + p * PANEL, side, head, nullptr, spare.data(),
                               sides[side].data() + p * panel);
#pragma omp for schedule(dynamic)
            for (int64_t low = 0; low < job.num_tokens; low += queries) {
                const int64_t count = std::min(queries, job.num_tokens - low);
                const int64_t rows = count * group, first = job.start + low, last = first + count;
                running.begin();
                for (int64_t t = 0; t < count; t++) {
                    const float* from = job.q + ((low + t) * job.num_heads + head * group) * dim;
                    for (int64_t i = 0; i < group * dim; i++)
                        running.q[t * group * dim + i] = from[i] * job.rule.scale;
                }
                A::take_queries(running.q.data(), rows * dim);
                const int64_t seen = window && first >= window ? first - window + 1 : 0;
                for (int64_t at = seen / KEY_BLOCK * KEY_BLOCK; at < last; at += KEY_BLOCK) {
                    const int64_t width = std::min(KEY_BLOCK, (last - at + PANEL - 1) / PANEL * PANEL);
                    const int64_t offset = (at - origin) / PANEL * panel;
                    attend_block<A>(running, rows, dim, group, sides[0].data() + offset, sides[1].data() + offset, at,
                                    width, first, job.rule);
                }
                for (int64_t r = 0; r < rows; r++)
                    give<A>(running, r, dim,
                            (T*)job.out + ((low + r / group) * job.num_heads + head * group + r % group) * dim);
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
    if (!is_bf16) return decode<Plain<float>>(job);
    Dots::knows(head_dim) ? decode<Dots>(job) : decode<Plain<bf16>>(job);
}

// q and out [T, H, D] at positions start, start + 1, ...; blocks: of the one sequence.
void baton_prefill_attention(int is_bf16, const float* q, const void* layer, int64_t block_stride,
                             int64_t num_kv_heads, int64_t num_slots, int64_t head_dim, const int64_t* blocks,
                             int64_t num_tokens, int64_t num_heads, int64_t start, float scale, float cap,
                             int64_t window, void* out, int num_threads) {
    const Slab slab{layer, block_stride, num_kv_heads, num_slots, head_dim};
    const Prefill job{q, slab, blocks, num_tokens, num_heads, start, {scale, cap, window}, out, num_threads};
    if (!is_bf16) return prefill<Plain<float>>(job);
    Dots::knows(head_dim) ? prefill<Dots>(job) : prefill<Plain<bf16>>(job);
}

}  // extern "C"
