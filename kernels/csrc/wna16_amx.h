// Many rows of one expert on Intel's tile unit (AMX): bf16 tiles, or int8 tiles for the class a8.
//
// A word row of the layout (16 outputs) unpacks straight into rows of a B tile: the codes of inputs
// 2p and 2p + 1 of every output are one row of a bf16 tile, four inputs one row of an int8 tile. So
// weights stay codes here as well; a scale group's product leaves the tiles and is scaled in fp32.
#pragma once

#include <algorithm>

#include "wna16_dot.h"
#include "wna16_int8.h"

#if defined(__AVX512BW__) && \
    (defined(WNA16_EMULATE_AMX) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)))
#define WNA16_HAS_AMX 1
#endif

#if defined(WNA16_HAS_AMX)
#if defined(WNA16_EMULATE_AMX)
#include "wna16_amx_emulated.h"
#else
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace wna16 {

// Linux grants the tile registers on demand; using them without asking ends the process.
inline bool amx_permission() {
#if defined(WNA16_EMULATE_AMX)
    return true;
#else
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
#endif
}

// Configures this thread's eight tiles as 16 rows of 64 bytes, and gives them back.
struct TileSession {
    explicit TileSession(bool wanted) : on(wanted) {
        if (!on) return;
        alignas(64) uint8_t config[64] = {1};
        for (int t = 0; t < 8; ++t) {
            config[16 + 2 * t] = 64;
            config[48 + t] = 16;
        }
        _tile_loadconfig(config);
    }
    ~TileSession() {
        if (on) _tile_release();
    }
    bool on;
};

constexpr int kTileRows = 16;
constexpr int kAmxRows = 128;   // rows whose sums one task keeps: 32 KiB beside 16 KiB of weights
constexpr int kAmxPanels = 4;
constexpr int kAmxTiles = 4;    // tiles along K that are unpacked at once, a panel

template <class Path>
constexpr int tile_inputs() { return 64 / int(sizeof(typename Path::Elem)); }

// Words [count][16] to rows of B tiles, 64 bytes each.
template <class Path, int kBits>
inline void unpack_tiles(const uint32_t* codes, int64_t count, uint8_t* tiles) {
    for (int64_t k = 0; k < count; ++k) {
        const __m512i v = _mm512_loadu_si512(codes + k * kLanes);
        auto put = [&](int row, int rows, __m512i value) {
            _mm512_store_si512(tiles + (k * rows + row) * 64, value);
        };
        if constexpr (sizeof(typename Path::Elem) == 1) {
            const __m512i mask = _mm512_set1_epi8(15);
            if constexpr (kBits == 8) put(0, 1, v);
            else
                for (int i = 0; i < 2; ++i) put(i, 2, _mm512_and_si512(_mm512_srli_epi32(v, 4 * i), mask));
        } else if constexpr (kBits == 4) {
            const __m512i table = DotBF16::table(1, 8);
            for (int i = 0; i < 4; ++i) put(i, 4, _mm512_permutexvar_epi16(_mm512_srli_epi32(v, 4 * i), table));
        } else {  // 8 bits: u - 128 has at most 8 significant bits, so the upper half of its float is exact
            const __m512i byte = _mm512_set1_epi32(255), middle = _mm512_set1_epi32(128);
            for (int i = 0; i < 2; ++i) {
                auto value = [&](int shift) {
                    const __m512i code = _mm512_and_si512(_mm512_srli_epi32(v, shift), byte);
                    return (__m512i)_mm512_cvtepi32_ps(_mm512_sub_epi32(code, middle));
                };
                put(i, 2, _mm512_or_si512(_mm512_srli_epi32(value(8 * i), 16),
                                          _mm512_and_si512(value(8 * i + 16), _mm512_set1_epi32(int(0xffff0000)))));
            }
        }
    }
}

#define WNA16_DP(c, a, b)                                                            \
    do {                                                                             \
        if constexpr (sizeof(typename Path::Elem) == 1) _tile_dpbsud(c, a, b);       \
        else _tile_dpbf16ps(c, a, b);                                                \
    } while (0)

// out[RT][NP][16][16] = rows x (tiles of NP panels), over `tiles` tiles of K; x bytes apart by `stride`.
template <class Path, int RT, int NP>
inline void tile_product(const uint8_t* x, int64_t stride, const uint8_t* b, int64_t panel_bytes, int tiles,
                         float* out) {
    _tile_zero(0);
    if (NP > 1) _tile_zero(1);
    if (RT > 1) _tile_zero(2);
    if (RT > 1 && NP > 1) _tile_zero(3);
    for (int t = 0; t < tiles; ++t) {
        _tile_loadd(4, x + t * 64, stride);
        _tile_loadd(6, b + t * 1024, 64);
        WNA16_DP(0, 4, 6);
        if (NP > 1) {
            _tile_loadd(7, b + panel_bytes + t * 1024, 64);
            WNA16_DP(1, 4, 7);
        }
        if (RT > 1) {
            _tile_loadd(5, x + kTileRows * stride + t * 64, stride);
            WNA16_DP(2, 5, 6);
            if (NP > 1) WNA16_DP(3, 5, 7);
        }
    }
    _tile_stored(0, out, 64);
    if (NP > 1) _tile_stored(1, out + 256, 64);
    if (RT > 1) _tile_stored(2, out + NP * 256, 64);
    if (RT > 1 && NP > 1) _tile_stored(3, out + NP * 256 + 256, 64);
}
#undef WNA16_DP

inline bool amx_can(const Wna16Gemm& g, int inputs_of_tile) {
    return g.group_inputs % inputs_of_tile == 0 && g.inputs % inputs_of_tile == 0;
}

// acc[row][panel * 16 + lane] of up to kAmxRows rows and kAmxPanels panels.
template <class Path>
struct AmxBlock {
    using Elem = typename Path::Elem;
    alignas(64) float acc[kAmxRows][kAmxPanels * kLanes];
    alignas(64) uint8_t weights[kAmxPanels][kAmxTiles * 1024];
    alignas(64) float product[4 * 256];

    // x may be read up to the next multiple of 16 rows; what comes of those rows is not used.
    template <int kBits>
    void run(const Wna16Gemm& g, const Elem* x, int64_t ldx, const float* xsum, const float* xscale,
             const int64_t* panel, int panels, int rows) {
        constexpr int kFactor = 32 / kBits, kInputs = tile_inputs<Path>();
        for (int m = 0; m < rows; ++m) std::fill(acc[m], acc[m] + kAmxPanels * kLanes, 0.0f);
        const int64_t words = g.inputs / kFactor;
        for (int64_t group = 0; group < g.groups; ++group) {
            const int64_t begin = group * g.group_inputs, end = std::min(g.inputs, begin + g.group_inputs);
            for (int64_t k = begin; k < end; k += kAmxTiles * kInputs) {
                const int tiles = int(std::min<int64_t>(kAmxTiles, (end - k) / kInputs));
                for (int n = 0; n < panels; ++n)
                    unpack_tiles<Path, kBits>(g.codes + (panel[n] * words + k / kFactor) * kLanes,
                                              tiles * kInputs / kFactor, weights[n]);
                const bool last = k + tiles * kInputs >= end;
                for (int m = 0; m < rows;) {
                    const bool two = rows - m > kTileRows;
                    for (int n = 0; n < panels;) {
                        const bool wide = panels - n > 1;
                        const uint8_t* from = reinterpret_cast<const uint8_t*>(x + m * ldx + k);
                        const int64_t stride = ldx * int64_t(sizeof(Elem)), apart = sizeof weights[0];
                        if (two && wide) tile_product<Path, 2, 2>(from, stride, weights[n], apart, tiles, product);
                        else if (two) tile_product<Path, 2, 1>(from, stride, weights[n], apart, tiles, product);
                        else if (wide) tile_product<Path, 1, 2>(from, stride, weights[n], apart, tiles, product);
                        else tile_product<Path, 1, 1>(from, stride, weights[n], apart, tiles, product);
                        for (int j = 0; j < (wide ? 2 : 1); ++j)
                            for (int r = 0; r < (two ? 2 : 1); ++r)
                                add<kBits>(g, panel[n + j], group, last, product + (r * (wide ? 2 : 1) + j) * 256,
                                           m + r * kTileRows, std::min(rows, m + (r + 1) * kTileRows), n + j, xsum, xscale);
                        n += wide ? 2 : 1;
                    }
                    m += two ? 2 * kTileRows : kTileRows;
                }
            }
        }
    }

    // A group's product into the sums: acc += (product - zero * sum(x)) * scale (* scale of x).
    template <int kBits>
    void add(const Wna16Gemm& g, int64_t panel, int64_t group, bool last, const float* from, int row, int stop,
             int n, const float* xsum, const float* xscale) {
        const int64_t at = (panel * g.groups + group) * kLanes;
        const f32x16 scale = load_as_f32(g.scales, at, g.scale_dtype);
        f32x16 zero = splat(float((1 << (kBits - 1)) - Path::base(kBits)));
        if (g.zeros) zero = __builtin_convertvector(load<u8x16>(g.zeros + at), f32x16) - float(Path::base(kBits));
        for (int m = row; m < stop; ++m, from += kLanes) {
            f32x16 part = sizeof(Elem) == 1 ? __builtin_convertvector(load<i32x16>(from), f32x16) : load<f32x16>(from);
            if (xsum && last) part -= zero * xsum[m * g.groups + group];
            f32x16 by = scale;
            if (xscale) by *= xscale[m * g.groups + group];
            store(acc[m] + n * kLanes, load<f32x16>(acc[m] + n * kLanes) + part * by);
        }
    }
};

}  // namespace wna16
#endif
