// Fused int4/int8-weight mixture-of-experts layer for CPUs: exact weights, 16- or 32-bit activations,
// or, as a class of its own, activations in 8 bits.
//
// Weights stay packed; a code is turned into its (exact) value inside the registers or tiles,
// multiplied and summed over one scale group, and only then scaled in fp32, so no weight is ever
// rounded. Tokens of one expert are taken together, gate, up and the activation are one pass, and
// every byte of weight is read once for up to six rows (tiles: 128).
//
// Plain C interface, no other headers: autosel/native.py builds it with the system compiler and calls
// it through ctypes. Layout (autosel/layouts/panel16.py): 16 outputs side by side,
//   codes  uint32 [E][N/16][K/pf][16]      scales [E][N/16][G][16]      zeros uint8 [E][N/16][G][16]
#include "wna16_layer.h"

using namespace wna16;

namespace {

template <class Path>
int64_t go(const Wna16Layer& layer, const Wna16Call& call, bool tiles, bool run) {
    Layer<Path> state(layer, call, tiles);
    if (!run) return state.place(nullptr);
    state.place(call.workspace);
    state.run();
    return 0;
}

int64_t dispatch(const Wna16Layer& layer, const Wna16Call& call, bool run) {
    switch (call.dot) {
#if defined(WNA16_HAS_BF16_DOT)
        case kDotBF16: return go<DotBF16>(layer, call, false, run);
        case kDotAmx: return go<DotBF16>(layer, call, true, run);
#endif
#if defined(WNA16_HAS_INT8_DOT)
        case kDotInt8: return go<DotInt8>(layer, call, false, run);
        case kDotAmxInt8: return go<DotInt8>(layer, call, true, run);
#endif
        default: return go<DotF32>(layer, call, false, run);
    }
}

}  // namespace

extern "C" {

// Whether this build, this processor's system and this process can run a kind of product.
int wna16_can(int32_t dot) {
#if defined(WNA16_HAS_BF16_DOT)
    if (dot == kDotBF16) return 1;
#if defined(WNA16_HAS_AMX)
    if (dot == kDotAmx) return amx_permission();
#endif
#endif
#if defined(WNA16_HAS_INT8_DOT)
    if (dot == kDotInt8) return 1;
#if defined(WNA16_HAS_AMX)
    if (dot == kDotAmxInt8) return amx_permission();
#endif
#endif
    return dot == kDotF32;
}

int64_t wna16_workspace_bytes(const Wna16Layer* layer, const Wna16Call* call) { return dispatch(*layer, *call, false); }

void wna16_run(const Wna16Layer* layer, const Wna16Call* call) { dispatch(*layer, *call, true); }
}
