// What stands between the products of a layer, each in one pass over its rows: norms with the residual addition, rotation
// with the writing of keys and values, gates.
#include <cmath>

#include "vec.h"

namespace baton {
namespace {

inline float mean_square(const float* x, int64_t n) {
    vf acc{};
    int64_t i = 0;
    for (; i + W <= n; i += W) acc = load(x + i) * load(x + i) + acc;
    float total = sum(acc);
    for (; i < n; i++) total += x[i] * x[i];
    return total / float(n);
}

// hidden += post is null ? added : norm(added) * post;  out = norm(hidden) * weight
template <class A, class O>
void add_norm(float* hidden, const A* added, const float* post, const float* weight, float eps, int64_t num_rows,
              int64_t width, float* scratch, O* out) {
    for (int64_t r = 0; r < num_rows; r++, hidden += width, out += width) {
        if (added) {
            for (int64_t i = 0; i < width; i++) scratch[i] = to_float(added[i]);
            if (post) {
                const float factor = 1.0f / std::sqrt(mean_square(scratch, width) + eps);
                for (int64_t i = 0; i < width; i++) scratch[i] = scratch[i] * factor * post[i];
            }
            for (int64_t i = 0; i < width; i++) hidden[i] += scratch[i];
            added += width;
        }
        const float factor = 1.0f / std::sqrt(mean_square(hidden, width) + eps);
        for (int64_t i = 0; i < width; i++) from_float(out + i, hidden[i] * factor * weight[i]);
    }
}

struct Heads {
    const float *norms, *cos, *sin;  // [H + K, D] or null; [T, D / 2]
    float eps;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, num_slots, block_stride;
    const int64_t *blocks, *slots;  // [T]
};

template <class X>
void turned(const X* x, const float* norm, const float* cos, const float* sin, float eps, int64_t dim, float* out) {
    float factor = 1.0f;
    for (int64_t d = 0; d < dim; d++) out[d] = to_float(x[d]);
    if (norm) {
        factor = 1.0f / std::sqrt(mean_square(out, dim) + eps);
        for (int64_t d = 0; d < dim; d++) out[d] = out[d] * factor * norm[d];
    }
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
        const float low = out[d], high = out[d + half];
        out[d] = low * cos[d] - high * sin[d];
        out[d + half] = high * cos[d] + low * sin[d];
    }
}

// qkv [T, (H + 2 K) D] -> q [T, H, D], rotated; keys, rotated, and values into their slots.
template <class X, class T>
void split_heads(const Heads& job, const X* qkv, float* q, T* layer, float* key) {
    const int64_t dim = job.head_dim, plane = job.num_slots * dim;
    for (int64_t t = 0; t < job.num_tokens; t++) {
        const float *cos = job.cos + t * dim / 2, *sin = job.sin + t * dim / 2;
        for (int64_t h = 0; h < job.num_heads; h++, qkv += dim, q += dim)
            turned(qkv, job.norms ? job.norms + h * dim : nullptr, cos, sin, job.eps, dim, q);
        T* block = layer + job.blocks[t] * job.block_stride + job.slots[t] * dim;
        for (int64_t k = 0; k < job.num_kv_heads; k++, qkv += dim) {
            turned(qkv, job.norms ? job.norms + (job.num_heads + k) * dim : nullptr, cos, sin, job.eps, dim, key);
            for (int64_t d = 0; d < dim; d++) from_float(block + k * plane + d, key[d]);
        }
        for (int64_t k = 0; k < job.num_kv_heads; k++, qkv += dim)
            for (int64_t d = 0; d < dim; d++)
                from_float(block + (job.num_kv_heads + k) * plane + d, to_float(qkv[d]));
    }
}

template <bool IS_GELU>
inline vf gate(vf x) {
    if (IS_GELU) {
        // (1 + tanh(y)) / 2 = 1 / (1 + e^(-2 y)), which loses nothing where tanh is near -1
        const vf doubled = 1.5957691216f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exp(-doubled));
    }
    return x / (1.0f + exp(-x));
}

template <bool IS_GELU, class X, class O>
void gated(const X* gate_up, int64_t num_rows, int64_t inner, O* out) {
    for (int64_t r = 0; r < num_rows; r++, gate_up += 2 * inner, out += inner) {
        int64_t i = 0;
        for (; i + W <= inner; i += W)
            store(out + i, gate<IS_GELU>(load(gate_up + i)) * load(gate_up + inner + i));
        for (; i < inner; i++) {
            const vf x = broadcast(to_float(gate_up[i]));
            from_float(out + i, gate<IS_GELU>(x)[0] * to_float(gate_up[inner + i]));
        }
    }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// hidden [T, width] float32, changed in place; added (or null) of type `is_bf16_in`, out of type `is_bf16_out`;
// scratch [width].
void baton_add_norm(float* hidden, const void* added, int is_bf16_in, const float* post, const float* weight, float eps,
                    int64_t num_rows, int64_t width, float* scratch, void* out, int is_bf16_out) {
    if (is_bf16_in && is_bf16_out)
        add_norm(hidden, (const bf16*)added, post, weight, eps, num_rows, width, scratch, (bf16*)out);
    else if (is_bf16_in)
        add_norm(hidden, (const bf16*)added, post, weight, eps, num_rows, width, scratch, (float*)out);
    else if (is_bf16_out)
        add_norm(hidden, (const float*)added, post, weight, eps, num_rows, width, scratch, (bf16*)out);
    else
        add_norm(hidden, (const float*)added, post, weight, eps, num_rows, width, scratch, (float*)out);
}

// qkv [T, (H + 2 K) D]; q [T, H, D] float32; cos and sin [T, D / 2]; norms [H + K, D] or null; scratch [D].
void baton_split_heads(const void* qkv, int is_bf16_in, float* q, void* layer, int is_bf16_out, int64_t block_stride,
                       int64_t num_slots, const int64_t* blocks, const int64_t* slots, const float* norms,
                       const float* cos, const float* sin, float eps, int64_t num_tokens, int64_t num_heads,
                       int64_t num_kv_heads, int64_t head_dim, float* scratch) {
    const Heads job{norms, cos,       sin,          eps,    num_tokens, num_heads, num_kv_heads, head_dim,
                    num_slots, block_stride, blocks, slots};
    if (is_bf16_in && is_bf16_out)
        split_heads(job, (const bf16*)qkv, q, (bf16*)layer, scratch);
    else if (is_bf16_in)
        split_heads(job, (const bf16*)qkv, q, (float*)layer, scratch);
    else if (is_bf16_out)
        split_heads(job, (const float*)qkv, q, (bf16*)layer, scratch);
    else
        split_heads(job, (const float*)qkv, q, (float*)layer, scratch);
}

// gate_up [T, 2 inner] -> act(first half) * second half, [T, inner].
void baton_gated(const void* gate_up, int is_bf16_in, int is_gelu, int64_t num_rows, int64_t inner, void* out,
                 int is_bf16_out) {
    const int key = (is_gelu ? 4 : 0) + (is_bf16_in ? 2 : 0) + (is_bf16_out ? 1 : 0);
    const float* wide = (const float*)gate_up;
    const bf16* narrow = (const bf16*)gate_up;
    switch (key) {
        case 0: return gated<false>(wide, num_rows, inner, (float*)out);
        case 1: return gated<false>(wide, num_rows, inner, (bf16*)out);
        case 2: return gated<false>(narrow, num_rows, inner, (float*)out);
        case 3: return gated<false>(narrow, num_rows, inner, (bf16*)out);
        case 4: return gated<true>(wide, num_rows, inner, (float*)out);
        case 5: return gated<true>(wide, num_rows, inner, (bf16*)out);
        case 6: return gated<true>(narrow, num_rows, inner, (float*)out);
        default: return gated<true>(narrow, num_rows, inner, (bf16*)out);
    }
}

}  // extern "C"
