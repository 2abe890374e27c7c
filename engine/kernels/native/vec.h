// One vector register of floats, by the compiler's vector extensions: AVX-512 has 16 lanes, everything else is written
// for 8 (AVX2; elsewhere the compiler splits them). Only conversions that compilers do badly are intrinsics.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef int8_t v8 __attribute__((vector_size(W)));
typedef uint16_t v16 __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;
};

template <class V, class T>
inline V load_as(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline vf load(const float* from) { return load_as<vf>(from); }
inline void store(float* to, vf v) { std::memcpy(to, &v, sizeof v); }
inline vf broadcast(float x) { return x - vf{}; }

inline vf load(const bf16* from) {
    const vu wide = __builtin_convertvector(load_as<v16>(from), vu) << 16;
    return (vf)wide;
}

// Round to nearest even, as torch does; NaN stays NaN.
inline uint32_t rounded(uint32_t bits) { return bits + 0x7fff + ((bits >> 16) & 1); }

inline void store(bf16* to, vf v) {
    const vu bits = (vu)v;
    const vu nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vi is_nan = v != v;
    const v16 half = __builtin_convertvector(is_nan ? (bits >> 16) | 0x40 : nearest, v16);
    std::memcpy(to, &half, sizeof half);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline void from_float(float* to, float x) { *to = x; }
inline void from_float(bf16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? uint16_t((bits >> 16) | 0x40) : uint16_t(rounded(bits) >> 16);
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        const float small = float(mantissa) * 0x1p-24f;
        std::memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// W half precision numbers.
inline vf load_half(const uint16_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = half_to_float(from[i]);
    return v;
#endif
}

inline vf int8_to_float(const int8_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(load_as<v8>(from), vi), vf);
#endif
}

#if defined(__AVX512BF16__)
// In each lane of `sum`, the products of the two bfloat16 of that lane added.
inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
#endif

inline float sum(vf v) {
    float parts[W];
    store(parts, v);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}

inline float largest(vf v) {
    float best = v[0];
    for (int i = 1; i < W; i++) best = v[i] > best ? v[i] : best;
    return best;
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

// e^x to about 2 units in the last place for x <= 88; below -87 it is about 1e-38. Cephes' expf.
inline vf exp(vf x) {
    x = max(x, broadcast(-87.0f));
    x = x < broadcast(88.0f) ? x : broadcast(88.0f);
    const vf shifter = broadcast(0x1.8p23f);
    const vf shifted = x * 1.44269504f + shifter;  // rounds to the nearest whole number in the low bits
    const vf n = shifted - shifter;
    const vf r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vf p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

inline vf tanh(vf x) {  // exact at both ends; about 1e-7 absolute between
    return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
}

}  // namespace baton
