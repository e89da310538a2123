// What a caller passes: a layer's packed weights, a call, and the numbers that stand for types,
// activations and kinds of product. autosel/backends/cpu_native.py has the same, for ctypes.
#pragma once

#include <cstdint>

namespace wna16 {

enum DType { kBF16 = 0, kF16 = 1, kF32 = 2 };

enum Act { kSilu, kGelu, kGeluTanh, kSwigluOai, kSwigluStep, kSitu, kSiluOne, kGeluOne, kGeluTanhOne, kRelu2One };

struct Activation {
    int32_t kind;            // an Act
    float limit, alpha, beta, linear_beta;
};

}  // namespace wna16

extern "C" {

struct Wna16Gemm {
    const uint32_t* codes;
    const void* scales;
    const uint8_t* zeros;   // null when symmetric
    const float* bias;      // [E][N] or null
    const int32_t* gather;  // [E][K]: input k of expert e is x[gather[e][k]]; null for k itself
    int64_t outputs;        // N, a multiple of 16
    int64_t inputs;         // K, a multiple of pf
    int64_t groups;
    int64_t group_inputs;   // inputs of one group, a multiple of pf
    int32_t scale_dtype;    // a DType
    int32_t bits;
};

struct Wna16Layer {
    Wna16Gemm w13, w2;
    int64_t experts, hidden, inter;      // logical sizes; the GEMMs above are padded
    int32_t gated, weight_on_input, act_dtype;
    wna16::Activation activation;
};

enum Wna16Dot { kDotF32, kDotBF16, kDotAmx, kDotInt8, kDotAmxInt8 };

struct Wna16Call {
    const void* x;           // [M][hidden] in act_dtype
    const int32_t* ids;      // [M][top_k], local expert; any other number is no expert
    const float* weights;    // [M][top_k]
    void* out;               // [M][hidden]
    uint8_t* workspace;
    int64_t tokens, top_k;
    int32_t threads;
    int32_t dot;             // a Wna16Dot that wna16_can() allows
};
}
