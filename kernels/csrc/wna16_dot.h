// The inner loop: a few rows of activations against a few panels of packed weights.
#pragma once

#include <algorithm>
#include <type_traits>

#include "wna16_interface.h"
#include "wna16_vec.h"

namespace wna16 {

// acc[m][n] = sum over k of x[m][k] * w(panel[n] lane, k) for MR rows and NB panels of 16 outputs.
// xsum: sums of x a group, where a zero point is left to take off; xscale: scales of 8-bit rows.
template <class Path, int kBits, int MR, int NB>
void dot_block(const Wna16Gemm& g, const typename Path::Elem* x, int64_t ldx, const float* xsum, const float* xscale,
               const int64_t (&panel)[NB], f32x16 (&acc)[MR][NB]) {
    using Sum = std::conditional_t<sizeof(typename Path::Elem) == 1, i32x16, f32x16>;
    constexpr int kFactor = 32 / kBits;
    const int64_t words = g.inputs / kFactor, per_group = g.group_inputs / kFactor;
    const uint32_t* codes[NB];
    for (int n = 0; n < NB; ++n) codes[n] = g.codes + panel[n] * words * kLanes;
    for (int m = 0; m < MR; ++m)
        for (int n = 0; n < NB; ++n) acc[m][n] = f32x16{};
#if defined(WNA16_HAS_BF16_DOT)
    const __m512i low = DotBF16::table(1, kBits == 4 ? 8 : 0), high = DotBF16::table(16, 8);
#endif
    for (int64_t group = 0; group < g.groups; ++group) {
        Sum sum[MR][NB] = {};
        const int64_t stop = std::min(words, (group + 1) * per_group);
        for (int64_t k = group * per_group; k < stop; ++k) {
            u32x16 v[NB];
#pragma GCC unroll 4
            for (int n = 0; n < NB; ++n) {
                v[n] = load<u32x16>(codes[n] + k * kLanes);
                // 2 KiB ahead: about 200 cycles of this loop at one row.
                __builtin_prefetch(codes[n] + (k + 32) * kLanes);
            }
#if defined(WNA16_HAS_BF16_DOT)
            if constexpr (sizeof(typename Path::Elem) == 2)
                Path::template word<kBits, MR, NB>(x + k * kFactor, ldx, v, sum, low, high);
            else
#endif
                Path::template word<kBits, MR, NB>(x + k * kFactor, ldx, v, sum);
        }
        for (int n = 0; n < NB; ++n) {
            const int64_t at = (panel[n] * g.groups + group) * kLanes;
            const f32x16 scale = load_as_f32(g.scales, at, g.scale_dtype);
            f32x16 zero = splat(float((1 << (kBits - 1)) - Path::base(kBits)));
            if (xsum && g.zeros)
                zero = __builtin_convertvector(load<u8x16>(g.zeros + at), f32x16) - float(Path::base(kBits));
            for (int m = 0; m < MR; ++m) {
                f32x16 part = __builtin_convertvector(sum[m][n], f32x16);
                if (xsum) part -= zero * xsum[m * g.groups + group];
                acc[m][n] += part * (xscale ? scale * xscale[m * g.groups + group] : scale);
            }
        }
    }
}

}  // namespace wna16
