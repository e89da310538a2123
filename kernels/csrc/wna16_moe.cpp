// Fused int4/int8-weight mixture-of-experts layer for CPUs: exact weights, 16- or 32-bit activations.
//
// Weights stay packed; a code is turned into its (exact) value inside the registers, multiplied and
// summed in fp32 over one scale group, and only then scaled, so no weight is ever rounded. Tokens of
// one expert are taken together, gate, up and the activation are one pass, and every byte of weight is
// read once for up to six rows.
//
// Plain C interface, no other headers: autosel/native.py builds it with the system compiler and calls
// it through ctypes. Layout (autosel/layouts/panel16.py): 16 outputs side by side,
//   codes  uint32 [E][N/16][K/pf][16]      scales [E][N/16][G][16]      zeros uint8 [E][N/16][G][16]
#include "wna16_act.h"
#include "wna16_dot.h"

#include <algorithm>
#if defined(_OPENMP)
#include <omp.h>
#endif

using namespace wna16;

extern "C" {

struct Wna16Layer {
    Wna16Gemm w13, w2;
    int64_t experts, hidden, inter;      // logical sizes; the GEMMs above are padded
    int32_t gated, weight_on_input, act_dtype;
    wna16::Activation activation;
};

struct Wna16Call {
    const void* x;           // [M][hidden] in act_dtype
    const int32_t* ids;      // [M][top_k], local expert or negative
    const float* weights;    // [M][top_k]
    void* out;               // [M][hidden]
    uint8_t* workspace;
    int64_t tokens, top_k;
    int32_t threads;
    int32_t bf16_dot;        // use the bf16 dot product where the build has it
};
}

namespace {

constexpr int kMaxRows = 6;  // 6 rows x 2 panels: 24 accumulators of the 32 AVX-512 registers
constexpr int64_t kAlign = 64;

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

template <class Path>
struct Layer {
    using Elem = typename Path::Elem;
    const Wna16Layer& layer;
    const Wna16Call& call;
    int64_t rows = 0;            // routed rows, sorted by expert
    int64_t ldx, ldh;            // elements in one row of x and h, padded to the weights' inputs
    bool sums13, sums2;
    int32_t *start, *slot, *where, *active;  // [E + 1], [rows], [M * top_k], [E]
    int64_t num_active = 0;
    Elem *x, *h;
    float *xsum, *hsum, *y;      // [rows][G], [rows][G], [rows][N2]

    Layer(const Wna16Layer& l, const Wna16Call& c) : layer(l), call(c) {
        ldx = l.w13.inputs + 32;  // off powers of two, so that rows do not share cache sets
        ldh = l.w2.inputs + 32;
        sums13 = l.w13.zeros || Path::base(l.w13.bits) == 0;
        sums2 = l.w2.zeros || Path::base(l.w2.bits) == 0;
    }

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
        take(x, most * ldx);
        take(h, most * ldh);
        take(xsum, sums13 ? most * layer.w13.groups : 0);
        take(hsum, sums2 ? most * layer.w2.groups : 0);
        take(y, most * layer.w2.outputs);
        return used;
    }

    void sort() {
        const int64_t most = call.tokens * call.top_k;
        std::fill(start, start + layer.experts + 1, 0);
        for (int64_t i = 0; i < most; ++i)
            if (call.ids[i] >= 0) ++start[call.ids[i] + 1];
        for (int64_t e = 0; e < layer.experts; ++e) {
            if (start[e + 1]) active[num_active++] = int32_t(e);
            start[e + 1] += start[e];
        }
        rows = start[layer.experts];
        for (int64_t i = 0; i < most; ++i) {
            where[i] = -1;
            if (call.ids[i] < 0) continue;
            where[i] = start[call.ids[i]]++;
            slot[where[i]] = int32_t(i);
        }
        for (int64_t e = layer.experts; e > 0; --e) start[e] = start[e - 1];
        start[0] = 0;
    }

    void put(Elem* to, int64_t k, f32x16 v) const {
        store_from_f32(to, k, v, sizeof(Elem) == 2 ? kBF16 : kF32);
    }

    void sum_groups(const Elem* row, const Wna16Gemm& g, float* sums) const {
        for (int64_t group = 0; group < g.groups; ++group) {
            const int64_t stop = std::min(g.inputs, (group + 1) * g.group_inputs);
            float total = 0;
            for (int64_t k = group * g.group_inputs; k < stop; ++k)
                total += sizeof(Elem) == 2 ? bf16_to_f32(uint16_t(row[k])) : float(row[k]);
            sums[group] = total;
        }
    }

    int64_t expert_of(int64_t row) const {
        return std::upper_bound(start, start + layer.experts + 1, int32_t(row)) - start - 1;
    }

    void gather_row(int64_t row) {
        const int64_t token = slot[row] / call.top_k, offset = token * layer.hidden;
        Elem* to = x + row * ldx;
        int64_t k = 0;
        if (layer.w13.gather) {
            const int32_t* from = layer.w13.gather + expert_of(row) * layer.w13.inputs;
            for (; k < layer.w13.inputs; ++k)
                to[k] = from[k] < 0 ? Elem(0) : to_elem(scalar(offset + from[k]));
        } else {
            for (; k + kLanes <= layer.hidden; k += kLanes)
                put(to, k, load_as_f32(call.x, offset + k, layer.act_dtype));
            for (; k < layer.hidden; ++k) to[k] = to_elem(scalar(offset + k));
            for (; k < layer.w13.inputs; ++k) to[k] = 0;
        }
        if (sums13) sum_groups(to, layer.w13, xsum + row * layer.w13.groups);
    }

    float scalar(int64_t index) const {
        if (layer.act_dtype == kF32) return static_cast<const float*>(call.x)[index];
        uint16_t bits = static_cast<const uint16_t*>(call.x)[index];
        return layer.act_dtype == kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }

    static Elem to_elem(float v) {
        if constexpr (sizeof(Elem) == 2) return f32_to_bf16(v);
        else return v;
    }

    // Gate and up of `kPanels` panels of 16 intermediate outputs, for MR rows of one expert.
    template <int kBits, int MR, int kPanels, bool kGated>
    void gate_up(int64_t e, int64_t row, int64_t block) {
        constexpr int NB = kGated ? 2 * kPanels : kPanels;
        const int64_t half = layer.w13.outputs / kLanes / (kGated ? 2 : 1);
        const int64_t first = e * (layer.w13.outputs / kLanes) + block;
        int64_t panel[NB];
        for (int n = 0; n < kPanels; ++n) {
            panel[n] = first + n;
            if (kGated) panel[kPanels + n] = first + half + n;
        }
        f32x16 acc[MR][NB];
        dot_block<Path, kBits, MR, NB>(layer.w13, x + row * ldx, ldx,
                                       sums13 ? xsum + row * layer.w13.groups : nullptr, panel, acc);
        for (int m = 0; m < MR; ++m) {
            if (layer.weight_on_input)
                for (int n = 0; n < NB; ++n) acc[m][n] *= call.weights[slot[row + m]];
            if (layer.w13.bias)
                for (int n = 0; n < NB; ++n) acc[m][n] += load<f32x16>(layer.w13.bias + panel[n] * kLanes);
            for (int n = 0; n < kPanels; ++n)
                put(h + (row + m) * ldh, (block + n) * kLanes,
                    activate(layer.activation, acc[m][n], kGated ? acc[m][kPanels + n] : acc[m][n]));
        }
    }

    template <int kBits, int MR, int NB>
    void down(int64_t e, int64_t row, int64_t block) {
        int64_t panel[NB];
        for (int n = 0; n < NB; ++n) panel[n] = e * (layer.w2.outputs / kLanes) + block + n;
        f32x16 acc[MR][NB];
        dot_block<Path, kBits, MR, NB>(layer.w2, h + row * ldh, ldh,
                                       sums2 ? hsum + row * layer.w2.groups : nullptr, panel, acc);
        for (int m = 0; m < MR; ++m)
            for (int n = 0; n < NB; ++n) {
                f32x16 v = acc[m][n];
                if (layer.w2.bias) v += load<f32x16>(layer.w2.bias + panel[n] * kLanes);
                store(y + (row + m) * layer.w2.outputs + (block + n) * kLanes, v);
            }
    }

    // All rows of expert e against panels [block, stop): few rows take four panels at once, so that
    // enough independent sums are in flight; six rows fill the registers with two.
    template <int kBits, bool kGated, bool kUp>
    void rows_of(int64_t e, int64_t block, int64_t stop) {
        const int64_t from = start[e], to = start[e + 1];
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
        const int64_t up_panels = layer.w13.outputs / kLanes / (layer.gated ? 2 : 1);
        const int64_t down_panels = layer.w2.outputs / kLanes;
        const int64_t up_blocks = (up_panels + step - 1) / step, down_blocks = (down_panels + step - 1) / step;
#pragma omp parallel num_threads(call.threads)
        {
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
                for (int64_t k = layer.inter; k < layer.w2.inputs; ++k) h[row * ldh + k] = 0;
                if (sums2) sum_groups(h + row * ldh, layer.w2, hsum + row * layer.w2.groups);
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

template <class Path>
int64_t go(const Wna16Layer& layer, const Wna16Call& call, bool run) {
    Layer<Path> state(layer, call);
    if (!run) return state.place(nullptr);
    state.place(call.workspace);
    state.run();
    return 0;
}

int64_t dispatch(const Wna16Layer& layer, const Wna16Call& call, bool run) {
#if defined(WNA16_HAS_BF16_DOT)
    if (call.bf16_dot && layer.act_dtype == kBF16) return go<DotBF16>(layer, call, run);
#endif
    return go<DotF32>(layer, call, run);
}

}  // namespace

extern "C" {

int wna16_has_bf16_dot() {
#if defined(WNA16_HAS_BF16_DOT)
    return 1;
#else
    return 0;
#endif
}

int64_t wna16_workspace_bytes(const Wna16Layer* layer, const Wna16Call* call) { return dispatch(*layer, *call, false); }

void wna16_run(const Wna16Layer* layer, const Wna16Call* call) { dispatch(*layer, *call, true); }
}
