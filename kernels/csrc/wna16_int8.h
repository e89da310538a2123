// Activations in 8 bits (accuracy class a8): a row is quantised a scale group at a time, codes and
// activations meet in integer dot products, and both scales are applied in fp32.
#pragma once

#include <algorithm>
#include <cmath>

#include "wna16_vec.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WNA16_HAS_INT8_DOT 1
#endif

namespace wna16 {

#if defined(WNA16_HAS_INT8_DOT)
struct DotInt8 {  // vpdpbusd: four unsigned codes times four signed activations
    using Elem = int8_t;
    static int base(int) { return 0; }

    // A word holds the codes of 2p and 2p + 1 at the same place of its half-words. Masking bytes
    // takes them in this order, so rows are stored in it.
    template <int kBits>
    static constexpr int source(int place) {
        constexpr int four[8] = {0, 4, 1, 5, 2, 6, 3, 7}, eight[4] = {0, 2, 1, 3};
        return kBits == 4 ? four[place] : eight[place];
    }

    template <int kBits, int MR, int NB>
    static inline void word(const int8_t* x, int64_t ldx, const u32x16 (&v)[NB], i32x16 (&part)[MR][NB]) {
        const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 2
        for (int i = 0; i < (kBits == 4 ? 2 : 1); ++i) {
            __m512i w[NB];
#pragma GCC unroll 4
            for (int n = 0; n < NB; ++n)
                w[n] = kBits == 8 ? (__m512i)v[n] : _mm512_and_si512(_mm512_srli_epi32((__m512i)v[n], 4 * i), mask);
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) {
                int32_t four;
                std::memcpy(&four, x + m * ldx + 4 * i, 4);
                const __m512i xv = _mm512_set1_epi32(four);
#pragma GCC unroll 4
                for (int n = 0; n < NB; ++n)
                    part[m][n] = (i32x16)_mm512_dpbusd_epi32((__m512i)part[m][n], w[n], xv);
            }
        }
    }
};

// One row of floats to codes in [-127, 127], a scale and the sum of the codes a group. A group with
// a value that is not finite gets a NaN scale, so that what comes out is not finite either.
template <int kBits>
inline void quantise_row(const float* from, int64_t inputs, int64_t group_inputs, int64_t groups,
                         int8_t* to, float* scales, float* sums) {
    constexpr int kFactor = 32 / kBits;
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t begin = group * group_inputs, end = std::min(inputs, begin + group_inputs);
        float most = 0;
        bool finite = true;
        for (int64_t k = begin; k < end; ++k) {
            most = std::max(most, std::fabs(from[k]));
            finite &= std::fabs(from[k]) <= 3.4028234e38f;
        }
        const float inverse = most > 0 ? 127.0f / most : 0.0f;
        int32_t total = 0;
        for (int64_t k = begin; k < end; k += kFactor)
            for (int place = 0; place < kFactor; ++place) {
                const float scaled = finite ? from[k + DotInt8::source<kBits>(place)] * inverse : 0.0f;
                const int32_t code = int32_t(std::nearbyint(scaled));
                to[k + place] = int8_t(code);
                total += code;
            }
        scales[group] = finite ? most / 127.0f : __builtin_nanf("");
        sums[group] = float(total);
    }
}
#endif

}  // namespace wna16
