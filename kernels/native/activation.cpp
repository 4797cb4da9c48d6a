// Gated activations over rows of [gate, up], and the soft cap of logits.
#include "cpu_graph.h"
#include "vec.h"

namespace baton {

enum class Activation : int { SILU = 0, GELU_TANH = 1 };  // numbers shared with activation/cpu.py

template <Activation kind> inline f32x16 activated(f32x16 x) {
    if constexpr (kind == Activation::SILU) return times_sigmoid(x, x);
    // 1/2 (1 + tanh(u)) = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
    return times_sigmoid(x, 1.59576912160573f * (x + 0.044715f * x * x * x));
}

template <class T, Activation kind>
void activation_and_mul_of(const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n, int threads) {
    constexpr int64_t SPAN = 1024;  // elements of a task, so that a single wide row is divided over threads, too
    int64_t spans = (n + SPAN - 1) / SPAN;
    bool parallel = rows * n >= 65536;  // below that, waking threads takes longer
#pragma omp parallel for num_threads(threads) if (parallel)
    for (int64_t task = 0; task < rows * spans; task++) {
        int64_t row = task / spans, begin = task % spans * SPAN;
        const T* gate = static_cast<const T*>(gate_up) + row * stride + begin;
        const T* up = gate + n;
        T* to = static_cast<T*>(out) + row * n + begin;
        for_lanes(n - begin < SPAN ? n - begin : SPAN, [&](int64_t i, int lanes) {
            store_upto(to + i, activated<kind>(load_upto(gate + i, lanes)) * load_upto(up + i, lanes), lanes);
        });
    }
}

template <class T>
void activation_and_mul(int activation, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n,
                        int threads) {
    switch (static_cast<Activation>(activation)) {
        case Activation::SILU:
            return activation_and_mul_of<T, Activation::SILU>(gate_up, stride, out, rows, n, threads);
        case Activation::GELU_TANH:
            return activation_and_mul_of<T, Activation::GELU_TANH>(gate_up, stride, out, rows, n, threads);
    }
}

template <class T> void soft_cap(void* x, int64_t stride, int64_t rows, int64_t n, float cap, int threads) {
    constexpr int64_t SPAN = 4096;
    int64_t spans = (n + SPAN - 1) / SPAN;
    bool parallel = rows * n >= 65536;
#pragma omp parallel for num_threads(threads) if (parallel)
    for (int64_t task = 0; task < rows * spans; task++) {
        int64_t row = task / spans, begin = task % spans * SPAN;
        T* values = static_cast<T*>(x) + row * stride + begin;
        for_lanes(n - begin < SPAN ? n - begin : SPAN, [&](int64_t i, int lanes) {
            store_upto(values + i, cap * tanh(load_upto(values + i, lanes) * (1.0f / cap)), lanes);
        });
    }
}

}  // namespace baton

extern "C" {

// gate_up [rows, 2 n] with `stride` elements from row to row, out [rows, n] contiguous.
void baton_activation_and_mul(int dtype, int activation, const void* gate_up, int64_t stride, void* out, int64_t rows,
                              int64_t n, int threads) {
    BATON_DISPATCH(dtype, baton::activation_and_mul, activation, gate_up, stride, out, rows, n, threads)
}

// x [rows, n] with `stride` elements from row to row: cap * tanh(x / cap), in place.
void baton_soft_cap(int dtype, void* x, int64_t stride, int64_t rows, int64_t n, float cap, int threads) {
    BATON_DISPATCH(dtype, baton::soft_cap, x, stride, rows, n, cap, threads)
}

}

BATON_RECORDABLE(baton_activation_and_mul)
BATON_RECORDABLE(baton_soft_cap)
