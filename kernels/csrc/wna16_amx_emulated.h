// Intel's tile instructions in plain C++, so that the tile path is tested on every processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace wna16_tiles {

struct Tile { uint8_t row[16][64]; };
inline Tile& tile(int t) {
    static thread_local Tile tiles[8];
    return tiles[t];
}
inline float bf16(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
template <class T, class F>
inline void product(int c, F&& term) {
    for (int m = 0; m < 16; ++m)
        for (int n = 0; n < 16; ++n) {
            T sum;
            std::memcpy(&sum, tile(c).row[m] + 4 * n, 4);
            for (int k = 0; k < 16; ++k) sum += term(m, n, k);
            std::memcpy(tile(c).row[m] + 4 * n, &sum, 4);
        }
}
inline void dpbf16ps(int c, int a, int b) {
    product<float>(c, [&](int m, int n, int k) {
        const uint8_t *x = tile(a).row[m] + 4 * k, *w = tile(b).row[k] + 4 * n;
        return bf16(x) * bf16(w) + bf16(x + 2) * bf16(w + 2);
    });
}
inline void dpbsud(int c, int a, int b) {
    product<int32_t>(c, [&](int m, int n, int k) {
        int32_t sum = 0;
        for (int i = 0; i < 4; ++i) sum += int8_t(tile(a).row[m][4 * k + i]) * int32_t(tile(b).row[k][4 * n + i]);
        return sum;
    });
}

}  // namespace wna16_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0
#define _tile_zero(t) std::memset(&wna16_tiles::tile(t), 0, sizeof(wna16_tiles::Tile))
#define _tile_loadd(t, from, stride)                                                  \
    do {                                                                              \
        for (int r_ = 0; r_ < 16; ++r_)                                               \
            std::memcpy(wna16_tiles::tile(t).row[r_],                                 \
                        reinterpret_cast<const uint8_t*>(from) + r_ * (stride), 64);  \
    } while (0)
#define _tile_stored(t, to, stride)                                                   \
    do {                                                                              \
        for (int r_ = 0; r_ < 16; ++r_)                                               \
            std::memcpy(reinterpret_cast<uint8_t*>(to) + r_ * (stride),               \
                        wna16_tiles::tile(t).row[r_], 64);                            \
    } while (0)
#define _tile_dpbf16ps(c, a, b) wna16_tiles::dpbf16ps(c, a, b)
#define _tile_dpbsud(c, a, b) wna16_tiles::dpbsud(c, a, b)
