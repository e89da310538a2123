// The element-wise functions between the two GEMMs, sixteen values at a time.
#pragma once

#include <cmath>

#include "wna16_interface.h"
#include "wna16_vec.h"

namespace wna16 {

inline f32x16 sigmoid(f32x16 v) { return 1.0f / (1.0f + exp16(-v)); }
inline f32x16 tanh16(f32x16 v) { return 2.0f * sigmoid(2.0f * v) - 1.0f; }
inline f32x16 min16(f32x16 a, float b) { i32x16 m = a < b; return (f32x16)(((i32x16)a & m) | ((i32x16)splat(b) & ~m)); }
inline f32x16 max16(f32x16 a, float b) { i32x16 m = a > b; return (f32x16)(((i32x16)a & m) | ((i32x16)splat(b) & ~m)); }
inline f32x16 clamp16(f32x16 a, float b) { return max16(min16(a, b), -b); }
inline f32x16 gelu(f32x16 v) {
    for (int i = 0; i < kLanes; ++i) v[i] = 0.5f * v[i] * (1.0f + std::erf(v[i] * 0.70710678118654752f));
    return v;
}
inline f32x16 gelu_tanh(f32x16 v) {
    return 0.5f * v * (1.0f + tanh16(0.79788456080286536f * (v + 0.044715f * v * v * v)));
}

// min16 and max16 send NaN to the bound; the models' clamps keep it, so it is put back.
inline f32x16 keep_nan(f32x16 source, f32x16 v) {
    i32x16 good = source == source;
    return (f32x16)(((i32x16)v & good) | ((i32x16)source & ~good));
}

inline f32x16 activate(const Activation& act, f32x16 g, f32x16 u) {
    switch (act.kind) {
        case kSilu:
            if (act.limit > 0) {
                g = keep_nan(g, min16(g, act.limit));
                u = keep_nan(u, clamp16(u, act.limit));
            }
            return g * sigmoid(g) * u;
        case kGelu: return gelu(g) * u;
        case kGeluTanh: return gelu_tanh(g) * u;
        case kSwigluOai:
            g = keep_nan(g, min16(g, act.limit));
            u = keep_nan(u, clamp16(u, act.limit));
            return g * sigmoid(act.alpha * g) * (u + act.beta);
        case kSwigluStep:
            g = g * sigmoid(g);
            return keep_nan(g, min16(g, act.limit)) * keep_nan(u, clamp16(u, act.limit));
        case kSitu: {
            f32x16 up = act.linear_beta > 0 ? act.linear_beta * tanh16(u / act.linear_beta) : u;
            return act.beta * tanh16(g / act.beta) * sigmoid(g) * up;
        }
        case kSiluOne: return g * sigmoid(g);
        case kGeluOne: return gelu(g);
        case kGeluTanhOne: return gelu_tanh(g);
        default: { f32x16 r = max16(g, 0.0f); r = keep_nan(g, r); return r * r; }
    }
}

}  // namespace wna16
