// Sixteen floats at a time, and the two ways of turning packed codes into multiplications.
//
// GCC and Clang vector extensions carry everything that has no special instruction, so the same
// source compiles for AVX2, NEON and plain machines; AVX-512 and AVX512-BF16 get table look-ups.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "wna16_interface.h"

namespace wna16 {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

constexpr int kLanes = 16;

template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

inline f32x16 splat(float v) { return f32x16{} + v; }

inline float bf16_to_f32(uint16_t bits) {
    uint32_t u = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t f32_to_bf16(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if defined(__aarch64__)
typedef __fp16 half_t;  // g++ knows _Float16 in C++ from version 13 on there
#else
typedef _Float16 half_t;
#endif

inline float f16_to_f32(uint16_t bits) {
    half_t h;
    std::memcpy(&h, &bits, 2);
    return float(h);
}

inline uint16_t f32_to_f16(float f) {
    half_t h = half_t(f);
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}

inline f32x16 load_as_f32(const void* base, int64_t index, int dtype) {
    if (dtype == kF32) return load<f32x16>(static_cast<const float*>(base) + index);
    const uint16_t* p = static_cast<const uint16_t*>(base) + index;
    if (dtype == kBF16) {
        u32x16 wide = __builtin_convertvector(load<u16x16>(p), u32x16) << 16;
        return (f32x16)wide;
    }
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    f32x16 out;
    for (int i = 0; i < kLanes; ++i) out[i] = f16_to_f32(p[i]);
    return out;
#endif
}

inline void store_from_f32(void* base, int64_t index, f32x16 v, int dtype) {
    if (dtype == kF32) return store(static_cast<float*>(base) + index, v);
    uint16_t* p = static_cast<uint16_t*>(base) + index;
#if defined(__AVX512BF16__)
    if (dtype == kBF16) {
        __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
        std::memcpy(p, &narrow, sizeof narrow);
        return;
    }
#endif
#if defined(__AVX512F__)
    if (dtype == kF16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                            _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#endif
    for (int i = 0; i < kLanes; ++i) p[i] = dtype == kBF16 ? f32_to_bf16(v[i]) : f32_to_f16(v[i]);
}

// exp(x), relative error below 2e-7 between -87 and 88, clamped outside.
inline f32x16 exp16(f32x16 x) {
    const f32x16 lo = splat(-87.0f), hi = splat(88.0f);
    i32x16 below = x < lo, above = x > hi;
    x = (f32x16)(((i32x16)lo & below) | ((i32x16)x & ~below));
    x = (f32x16)(((i32x16)hi & above) | ((i32x16)x & ~above));
    // Adding 1.5 * 2**23 rounds to the nearest integer in the low mantissa bits.
    const f32x16 magic = splat(12582912.0f);
    f32x16 shifted = x * 1.44269504088896f + magic;
    i32x16 n = (i32x16)shifted - (i32x16)magic;
    f32x16 k = shifted - magic;
    f32x16 r = x - k * 0.693145751953125f - k * 1.42860682030941723212e-6f;
    f32x16 p = splat(1.0f / 5040);
    const float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : taylor) p = p * r + c;
    return p * (f32x16)((n + 127) << 23);
}

// How one 32-bit word per output, holding 8 (4 bit) or 4 (8 bit) codes along K, meets the inputs.
// The codes of k = 2p and 2p + 1 sit at the same place of the low and the high half-word, so that
// a shift lines up a pair for a bf16 dot product. `base` is what the path subtracts from a code by
// itself; the caller takes (zero point - base) * sum(x) off afterwards.

struct DotF32 {  // fp32 multiply-add; x is float [rows, K]
    using Elem = float;
    template <int kBits, int MR, int NB>
    static inline void word(const float* x, int64_t ldx, const u32x16 (&v)[NB],
                            f32x16 (&part)[MR][NB]);
    static int base(int bits) {
#if defined(__AVX512F__)
        return 1 << (bits - 1);
#else
        (void)bits;
        return 0;
#endif
    }
};

template <int kBits, int MR, int NB>
inline void DotF32::word(const float* x, int64_t ldx, const u32x16 (&v)[NB],
                         f32x16 (&part)[MR][NB]) {
    constexpr int kPairs = kBits == 4 ? 4 : 2;
#if defined(__AVX512F__)
    // vpermps reads the low four bits of each lane: a 16-entry table turns a nibble into
    // its value. An 8-bit code is two nibbles, the high one worth 16 (n - 8).
    const __m512 low = kBits == 4
        ? _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7)
        : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 high = _mm512_setr_ps(-128, -112, -96, -80, -64, -48, -32, -16, 0, 16, 32, 48, 64,
                                       80, 96, 112);
#endif
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            f32x16 w[NB];
#pragma GCC unroll 4
            for (int n = 0; n < NB; ++n) {
                u32x16 shifted = v[n] >> (kBits * p + 16 * half);
#if defined(__AVX512F__)
                __m512 value = _mm512_permutexvar_ps((__m512i)shifted, low);
                if (kBits == 8)
                    value = _mm512_add_ps(value, _mm512_permutexvar_ps((__m512i)(shifted >> 4), high));
                w[n] = (f32x16)value;
#else
                w[n] = __builtin_convertvector((i32x16)(shifted & ((1u << kBits) - 1)), f32x16);
#endif
            }
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) {
                f32x16 xv = splat(x[m * ldx + 2 * p + half]);
#pragma GCC unroll 4
                for (int n = 0; n < NB; ++n) part[m][n] += w[n] * xv;
            }
        }
    }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define WNA16_HAS_BF16_DOT 1
struct DotBF16 {  // vdpbf16ps; x is bf16 [rows, K], read as pairs
    using Elem = uint16_t;
    static int base(int bits) { return 1 << (bits - 1); }
    // vpermw reads the low five bits of each half-word; a table that repeats after 16 entries
    // makes the neighbour's bit harmless, so no mask is needed. Codes are exact in bf16.
    static inline __m512i table(int step, int offset) {
        alignas(64) uint16_t t[32];
        for (int i = 0; i < 32; ++i) t[i] = f32_to_bf16(float(step * (i % 16 - offset)));
        return _mm512_load_si512(t);
    }
    template <int kBits, int MR, int NB>
    static inline void word(const uint16_t* x, int64_t ldx, const u32x16 (&v)[NB],
                            f32x16 (&part)[MR][NB], __m512i low, __m512i high) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const int pair = kBits == 4 ? i : i / 2;
            const __m512i lut = kBits == 8 && i % 2 ? high : low;
            __m512i w[NB];
#pragma GCC unroll 4
            for (int n = 0; n < NB; ++n)
                w[n] = _mm512_permutexvar_epi16(_mm512_srli_epi32((__m512i)v[n], 4 * i), lut);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) {
                int32_t two;
                std::memcpy(&two, x + m * ldx + 2 * pair, 4);
                const __m512i xv = _mm512_set1_epi32(two);
#pragma GCC unroll 4
                for (int n = 0; n < NB; ++n)
                    part[m][n] = (f32x16)_mm512_dpbf16_ps((__m512)part[m][n], (__m512bh)w[n],
                                                          (__m512bh)xv);
            }
        }
    }
};
#endif

}  // namespace wna16
