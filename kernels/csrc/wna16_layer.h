// One call of the layer: rows sorted by expert, the two GEMMs, the weighted sum.
#pragma once

#include <algorithm>
#include <type_traits>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "wna16_act.h"
#include "wna16_amx.h"
#include "wna16_dot.h"
#include "wna16_int8.h"
#include "wna16_interface.h"

namespace wna16 {

constexpr int kMaxRows = 6;  // 6 rows x 2 panels: 24 accumulators of the 32 AVX-512 registers
constexpr int64_t kTileFrom = 4;  // rows of an expert from which on tiles are used
constexpr int64_t kAlign = 64;

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// Rows of one GEMM's inputs, as its products read them.
template <class Elem>
struct Rows {
    Elem* data;              // [rows][ld]
    int64_t ld;              // elements, off powers of two, so that rows do not share cache sets
    float *sums, *scales;    // [rows][G] or null: sums of the row's elements, scales of 8-bit rows
    const Wna16Gemm& gemm;

    const Elem* row(int64_t r) const { return data + r * ld; }
    const float* sums_of(int64_t r) const { return sums ? sums + r * gemm.groups : nullptr; }
    const float* scales_of(int64_t r) const { return scales ? scales + r * gemm.groups : nullptr; }
};

template <class Path>
struct Layer {
    using Elem = typename Path::Elem;
    static constexpr bool kQuantised = sizeof(Elem) == 1;
    using Mid = std::conditional_t<kQuantised, float, Elem>;  // what the activation writes

    const Wna16Layer& layer;
    const Wna16Call& call;
    const bool tiles;            // products of many rows on the tile unit
    int64_t rows = 0;            // routed rows, sorted by expert
    int32_t *start, *slot, *where, *active;  // [E + 1], [rows], [M * top_k], [E]
    int64_t num_active = 0;
    Rows<Elem> x, h;
    Mid* mid;                    // [rows][h.ld]; the same memory as h unless that is quantised
    float *wide, *y;             // [threads][x.ld], [rows][N2]

    Layer(const Wna16Layer& l, const Wna16Call& c, bool t)
        : layer(l), call(c), tiles(t), x{nullptr, l.w13.inputs + 64, nullptr, nullptr, l.w13},
          h{nullptr, l.w2.inputs + 64, nullptr, nullptr, l.w2} {}

    // Places every buffer; with base null it only counts the bytes.
    int64_t place(uint8_t* base) {
        int64_t used = 0;
        const int64_t most = call.tokens * call.top_k;
        auto take = [&](auto*& p, int64_t count) {
            p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(base + used);
            used += round_up(count * int64_t(sizeof *p), kAlign);
        };
        take(start, layer.experts + 1);
        take(active, layer.experts);
        take(slot, most);
        take(where, most);
        for (Rows<Elem>* r : {&x, &h}) {
            // Tiles are read whole: up to 15 rows beyond the last, whose products nobody uses.
            take(r->data, (most + (tiles ? 15 : 0)) * r->ld);
            const bool sums = r->gemm.zeros || Path::base(r->gemm.bits) == 0;
            take(r->sums, sums ? most * r->gemm.groups : 0);
            take(r->scales, kQuantised ? most * r->gemm.groups : 0);
            if (!sums) r->sums = nullptr;
            if (!kQuantised) r->scales = nullptr;
        }
        if constexpr (kQuantised) take(mid, most * h.ld);
        else mid = h.data;
        take(wide, kQuantised ? call.threads * x.ld : 0);
        take(y, most * layer.w2.outputs);
        return used;
    }

    // Any other id, negative or too large, belongs to no expert here.
    bool served(int64_t i) const { return call.ids[i] >= 0 && call.ids[i] < layer.experts; }

    void sort() {
        const int64_t most = call.tokens * call.top_k;
        std::fill(start, start + layer.experts + 1, 0);
        for (int64_t i = 0; i < most; ++i)
            if (served(i)) ++start[call.ids[i] + 1];
        for (int64_t e = 0; e < layer.experts; ++e) {
            if (start[e + 1]) active[num_active++] = int32_t(e);
            start[e + 1] += start[e];
        }
        rows = start[layer.experts];
        for (int64_t i = 0; i < most; ++i) {
            where[i] = -1;
            if (!served(i)) continue;
            where[i] = start[call.ids[i]]++;
            slot[where[i]] = int32_t(i);
        }
        for (int64_t e = layer.experts; e > 0; --e) start[e] = start[e - 1];
        start[0] = 0;
    }

    int64_t most_rows() const {
        int64_t most = 0;
        for (int64_t e = 0; e < layer.experts; ++e) most = std::max<int64_t>(most, start[e + 1] - start[e]);
        return most;
    }

    template <class T>
    static void put(T* to, int64_t k, f32x16 v) { store_from_f32(to, k, v, sizeof(T) == 2 ? kBF16 : kF32); }

    // From a row of values to what the products need of it: sums of its groups, or 8-bit codes.
    void finish(Rows<Elem>& r, int64_t row, const Mid* values) const {
        const Wna16Gemm& g = r.gemm;
#if defined(WNA16_HAS_INT8_DOT)
        if constexpr (kQuantised) {
            const int64_t at = row * g.groups;
            auto quantise = g.bits == 4 ? quantise_row<4> : quantise_row<8>;
            quantise(values, g.inputs, g.group_inputs, g.groups, r.data + row * r.ld, r.scales + at, r.sums + at);
            return;
        }
#endif
        if (!r.sums) return;
        for (int64_t group = 0; group < g.groups; ++group) {
            const int64_t stop = std::min(g.inputs, (group + 1) * g.group_inputs);
            float total = 0;
            for (int64_t k = group * g.group_inputs; k < stop; ++k)
                total += sizeof(Mid) == 2 ? bf16_to_f32(uint16_t(values[k])) : float(values[k]);
            r.sums[row * g.groups + group] = total;
        }
    }

    int64_t expert_of(int64_t row) const {
        return std::upper_bound(start, start + layer.experts + 1, int32_t(row)) - start - 1;
    }

    void gather_row(int64_t row) {
        const int64_t token = slot[row] / call.top_k, offset = token * layer.hidden;
        Mid* to;
        if constexpr (kQuantised) to = wide + thread() * x.ld;
        else to = x.data + row * x.ld;
        int64_t k = 0;
        if (layer.w13.gather) {
            const int32_t* from = layer.w13.gather + expert_of(row) * layer.w13.inputs;
            for (; k < layer.w13.inputs; ++k)
                to[k] = from[k] < 0 ? Mid(0) : to_mid(scalar(offset + from[k]));
        } else {
            for (; k + kLanes <= layer.hidden; k += kLanes)
                put(to, k, load_as_f32(call.x, offset + k, layer.act_dtype));
            for (; k < layer.hidden; ++k) to[k] = to_mid(scalar(offset + k));
            for (; k < layer.w13.inputs; ++k) to[k] = 0;
        }
        finish(x, row, to);
    }

    float scalar(int64_t index) const {
        if (layer.act_dtype == kF32) return static_cast<const float*>(call.x)[index];
        uint16_t bits = static_cast<const uint16_t*>(call.x)[index];
        return layer.act_dtype == kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }

    static Mid to_mid(float v) {
        if constexpr (sizeof(Mid) == 2) return f32_to_bf16(v);
        else return v;
    }

    static int64_t thread() {
#if defined(_OPENMP)
        return omp_get_thread_num();
#else
        return 0;
#endif
    }

    // Sums of one row and one panel (of gate and up) to the intermediate activations.
    void activated(int64_t row, int64_t block, int64_t gate, int64_t up, f32x16 g, f32x16 u) {
        if (layer.weight_on_input) {
            g *= call.weights[slot[row]];
            u *= call.weights[slot[row]];
        }
        if (layer.w13.bias) {
            g += load<f32x16>(layer.w13.bias + gate * kLanes);
            u += load<f32x16>(layer.w13.bias + up * kLanes);
        }
        put(mid + row * h.ld, block * kLanes, activate(layer.activation, g, u));
    }

    void summed(int64_t row, int64_t block, int64_t panel, f32x16 v) {
        if (layer.w2.bias) v += load<f32x16>(layer.w2.bias + panel * kLanes);
        store(y + row * layer.w2.outputs + block * kLanes, v);
    }

    int64_t up_half() const { return layer.w13.outputs / kLanes / (layer.gated ? 2 : 1); }

    // Gate and up of `kPanels` panels of 16 intermediate outputs, for MR rows of one expert.
    template <int kBits, int MR, int kPanels, bool kGated>
    void gate_up(int64_t e, int64_t row, int64_t block) {
        constexpr int NB = kGated ? 2 * kPanels : kPanels;
        const int64_t first = e * (layer.w13.outputs / kLanes) + block;
        int64_t panel[NB];
        for (int n = 0; n < kPanels; ++n) {
            panel[n] = first + n;
            if (kGated) panel[kPanels + n] = first + up_half() + n;
        }
        f32x16 acc[MR][NB];
        dot_block<Path, kBits, MR, NB>(layer.w13, x.row(row), x.ld, x.sums_of(row), x.scales_of(row), panel, acc);
        constexpr int kUpAt = kGated ? kPanels : 0;
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < kPanels; ++n)
                activated(row + m, block + n, panel[n], panel[kUpAt + n], acc[m][n], acc[m][kUpAt + n]);
    }

    template <int kBits, int MR, int NB>
    void down(int64_t e, int64_t row, int64_t block) {
        int64_t panel[NB];
        for (int n = 0; n < NB; ++n) panel[n] = e * (layer.w2.outputs / kLanes) + block + n;
        f32x16 acc[MR][NB];
        dot_block<Path, kBits, MR, NB>(layer.w2, h.row(row), h.ld, h.sums_of(row), h.scales_of(row), panel, acc);
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NB; ++n) summed(row + m, block + n, panel[n], acc[m][n]);
    }

#if defined(WNA16_HAS_AMX)
    // All rows of expert e against panels [block, stop) on the tile unit.
    template <int kBits, bool kGated, bool kUp>
    void tiles_of(int64_t e, int64_t block, int64_t stop) {
        constexpr int kPair = kUp && kGated ? 2 : 1;
        const Rows<Elem>& in = kUp ? x : h;
        const int64_t first = e * (in.gemm.outputs / kLanes);
        AmxBlock<Path> sums;
        for (int64_t b = block; b < stop; b += kAmxPanels / kPair) {
            const int wide = int(std::min<int64_t>(kAmxPanels / kPair, stop - b));
            int64_t panel[kAmxPanels];
            for (int n = 0; n < wide; ++n) {
                panel[n] = first + b + n;
                if (kPair == 2) panel[wide + n] = first + up_half() + b + n;
            }
            for (int64_t row = start[e]; row < start[e + 1]; row += kAmxRows) {
                const int count = int(std::min<int64_t>(kAmxRows, start[e + 1] - row));
                sums.template run<kBits>(in.gemm, in.row(row), in.ld, in.sums_of(row), in.scales_of(row), panel,
                                         wide * kPair, count);
                for (int m = 0; m < count; ++m)
                    for (int n = 0; n < wide; ++n) {
                        const int up = kPair == 2 ? wide + n : n;
                        const f32x16 v = load<f32x16>(sums.acc[m] + n * kLanes);
                        if constexpr (!kUp) summed(row + m, b + n, panel[n], v);
                        else activated(row + m, b + n, panel[n], panel[up], v, load<f32x16>(sums.acc[m] + up * kLanes));
                    }
            }
        }
    }
#endif

    // All rows of expert e against panels [block, stop): few rows take four panels at once, so that
    // enough independent sums are in flight; six rows fill the registers with two.
    template <int kBits, bool kGated, bool kUp>
    void rows_of(int64_t e, int64_t block, int64_t stop) {
        const int64_t from = start[e], to = start[e + 1];
#if defined(WNA16_HAS_AMX)
        if constexpr (sizeof(Elem) < 4)
            if (tiles && to - from >= kTileFrom && amx_can(kUp ? layer.w13 : layer.w2, tile_inputs<Path>()))
                return tiles_of<kBits, kGated, kUp>(e, block, stop);
#endif
        for (int64_t row = from; row < to;) {
            // Spread the remainder evenly: 7 rows run as 4 + 3, not 6 + 1.
            const int64_t left = to - row, pieces = (left + kMaxRows - 1) / kMaxRows;
            const int64_t m = (left + pieces - 1) / pieces;
            for (int64_t b = block; b < stop;) {
                const bool wide = m <= 2 && b + (kUp && kGated ? 2 : 4) <= stop;
                b += one<kBits, kGated, kUp>(e, row, b, m, wide, stop - b);
            }
            row += m;
        }
    }

    template <int kBits, bool kGated, bool kUp>
    int64_t one(int64_t e, int64_t row, int64_t b, int64_t m, bool wide, int64_t left) {
        constexpr int kWide = kUp && kGated ? 2 : 4, kNarrow = kUp && kGated ? 1 : 2;
#define WNA16_CASE(MR, NP)                                                    \
    do {                                                                      \
        if constexpr (kUp) gate_up<kBits, MR, NP, kGated>(e, row, b);         \
        else down<kBits, MR, NP>(e, row, b);                                  \
        return NP;                                                            \
    } while (0)
        if (wide) {
            if (m == 1) WNA16_CASE(1, kWide);
            WNA16_CASE(2, kWide);
        }
        if (left < kNarrow) {
            switch (m) {
                case 1: WNA16_CASE(1, 1);
                case 2: WNA16_CASE(2, 1);
                case 3: WNA16_CASE(3, 1);
                case 4: WNA16_CASE(4, 1);
                case 5: WNA16_CASE(5, 1);
                default: WNA16_CASE(6, 1);
            }
        }
        switch (m) {
            case 1: WNA16_CASE(1, kNarrow);
            case 2: WNA16_CASE(2, kNarrow);
            case 3: WNA16_CASE(3, kNarrow);
            case 4: WNA16_CASE(4, kNarrow);
            case 5: WNA16_CASE(5, kNarrow);
            default: WNA16_CASE(6, kNarrow);
        }
#undef WNA16_CASE
    }

    void tasks(bool up, int64_t e, int64_t block, int64_t stop) {
        const bool gated = layer.gated;
        if (up) {
            if (layer.w13.bits == 4) gated ? rows_of<4, true, true>(e, block, stop) : rows_of<4, false, true>(e, block, stop);
            else gated ? rows_of<8, true, true>(e, block, stop) : rows_of<8, false, true>(e, block, stop);
        } else {
            if (layer.w2.bits == 4) rows_of<4, false, false>(e, block, stop);
            else rows_of<8, false, false>(e, block, stop);
        }
    }

    void reduce(int64_t token) const {
        for (int64_t k = 0; k < layer.hidden; k += kLanes) {
            f32x16 sum = {};
            for (int64_t j = 0; j < call.top_k; ++j) {
                const int64_t i = token * call.top_k + j;
                if (where[i] < 0) continue;
                const float weight = layer.weight_on_input ? 1.0f : call.weights[i];
                sum += weight * load<f32x16>(y + where[i] * layer.w2.outputs + k);
            }
            const int64_t at = token * layer.hidden + k;
            if (k + kLanes <= layer.hidden) {
                store_from_f32(call.out, at, sum, layer.act_dtype);
                continue;
            }
            alignas(64) uint32_t tail[kLanes];
            const int64_t width = layer.act_dtype == kF32 ? 4 : 2;
            store_from_f32(tail, 0, sum, layer.act_dtype);
            std::memcpy(static_cast<uint8_t*>(call.out) + at * width, tail, size_t((layer.hidden - k) * width));
        }
    }

    void run() {
        sort();
        // Four panels a task: 64 outputs, so that one row still reads long streams and the
        // dynamic schedule can level out experts of different sizes.
        const int64_t step = 4;
        const int64_t up_panels = up_half();
        const int64_t down_panels = layer.w2.outputs / kLanes;
        const int64_t up_blocks = (up_panels + step - 1) / step, down_blocks = (down_panels + step - 1) / step;
#pragma omp parallel num_threads(call.threads)
        {
#if defined(WNA16_HAS_AMX)
            const TileSession session(most_rows() >= kTileFrom && tiles);  // about 15 us of a call
#endif
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) gather_row(row);
#pragma omp for schedule(dynamic, 1)
            for (int64_t t = 0; t < num_active * up_blocks; ++t) {
                const int64_t block = t % up_blocks * step;
                tasks(true, active[t / up_blocks], block, std::min(block + step, up_panels));
            }
            // The intermediate outputs are padded to 16; inputs of w2 beyond them are zero.
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) {
                Mid* values = mid + row * h.ld;
                for (int64_t k = layer.inter; k < layer.w2.inputs; ++k) values[k] = 0;
                finish(h, row, values);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t t = 0; t < num_active * down_blocks; ++t) {
                const int64_t block = t % down_blocks * step;
                tasks(false, active[t / down_blocks], block, std::min(block + step, down_panels));
            }
#pragma omp for schedule(static)
            for (int64_t token = 0; token < call.tokens; ++token) reduce(token);
        }
    }
};

}  // namespace wna16
