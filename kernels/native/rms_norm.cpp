// RMSNorm of rows, with the residual addition before it. One thread computes a row: its result does not depend on
// other rows.
#include <cmath>

#include "cpu_graph.h"
#include "vec.h"

namespace baton {

// Scales row by weight and the inverse root of its mean square. `sum_squares` may come from the pass before.
template <class T, class W> void scale_row(const T* row, const W* weight, T* out, int64_t n, float sum_squares, float eps) {
    f32x16 scale = splat(1.0f / std::sqrt(sum_squares / n + eps));
    for_lanes(n, [&](int64_t i, int lanes) {
        store_upto(out + i, load_upto(row + i, lanes) * scale * load_upto(weight + i, lanes), lanes);
    });
}

template <class T> float squares_of(const T* row, int64_t n) {
    f32x16 total = {};
    for_lanes(n, [&](int64_t i, int lanes) {
        f32x16 v = load_upto(row + i, lanes);
        total += v * v;
    });
    return sum(total);
}

// total = x + residual, rounded; squares are of the rounded values.
template <class T> float add_and_square(const T* x, const T* residual, T* total, int64_t n) {
    f32x16 squares = {};
    for_lanes(n, [&](int64_t i, int lanes) {
        store_upto(total + i, load_upto(x + i, lanes) + load_upto(residual + i, lanes), lanes);
        f32x16 v = load_upto(total + i, lanes);
        squares += v * v;
    });
    return sum(squares);
}

template <class T, class W>
void rms_norm_by(const void* x, int64_t x_stride, const void* residual, int64_t residual_stride, const void* weight,
                 void* total, void* out, int64_t rows, int64_t n, float eps, int threads) {
    bool parallel = rows > 1 && rows * n >= 65536;  // below that, waking threads takes longer
#pragma omp parallel for num_threads(threads) if (parallel)
    for (int64_t r = 0; r < rows; r++) {
        const T* row = static_cast<const T*>(x) + r * x_stride;
        float squares;
        if (residual == nullptr) {
            squares = squares_of(row, n);
        } else {
            T* sums = static_cast<T*>(total) + r * n;
            squares = add_and_square(row, static_cast<const T*>(residual) + r * residual_stride, sums, n);
            row = sums;
        }
        scale_row(row, static_cast<const W*>(weight), static_cast<T*>(out) + r * n, n, squares, eps);
    }
}

template <class T>
void rms_norm(int weight_dtype, const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
              const void* weight, void* total, void* out, int64_t rows, int64_t n, float eps, int threads) {
    auto run = static_cast<DType>(weight_dtype) == DType::F32 ? rms_norm_by<T, float> : rms_norm_by<T, T>;
    run(x, x_stride, residual, residual_stride, weight, total, out, rows, n, eps, threads);
}

struct GatedSizes {  // the integers in the order of rms_norm/cpu.py; strides in elements
    int64_t heads, dim, x_stride, gate_stride, out_stride, weight_stride;  // weight_stride: from head to head
};

// Scales a row as above, and multiplies it by silu(gate) or sigmoid(gate), after scaling or before. scratch [n].
template <class T, class W, bool SIGMOID, bool FIRST>
void scale_gated_row(const T* row, const T* gate, const W* weight, T* out, int64_t n, float eps, float* scratch) {
    f32x16 squares = {};
    for_lanes(n, [&](int64_t i, int lanes) {
        const f32x16 x = load_upto(row + i, lanes), z = load_upto(gate + i, lanes);
        const f32x16 factor = times_sigmoid(SIGMOID ? splat(1.0f) : z, z), v = FIRST ? x * factor : x;
        store_upto(scratch + i, FIRST ? v : factor, lanes);
        squares += v * v;
    });
    float scale = 1.0f / std::sqrt(sum(squares) / n + eps);
    for_lanes(n, [&](int64_t i, int lanes) {
        const f32x16 kept = load_upto(scratch + i, lanes), w = load_upto(weight + i, lanes);
        store_upto(out + i, FIRST ? kept * scale * w : load_upto(row + i, lanes) * scale * w * kept, lanes);
    });
}

template <class T, class W, bool SIGMOID, bool FIRST>
void gated_rms_norm_by(const GatedSizes& sizes, const void* x, const void* gate, const void* weight, void* out,
                       int64_t tokens, float eps, int threads) {
    int64_t heads = sizes.heads, n = sizes.dim;
    bool parallel = tokens * heads > 1 && tokens * heads * n >= 65536;  // below that, waking threads takes longer
#pragma omp parallel for num_threads(threads) if (parallel)
    for (int64_t r = 0; r < tokens * heads; r++) {
        int64_t token = r / heads, head = r % heads, at = head * n;
        scale_gated_row<T, W, SIGMOID, FIRST>(static_cast<const T*>(x) + token * sizes.x_stride + at,
                                              static_cast<const T*>(gate) + token * sizes.gate_stride + at,
                                              static_cast<const W*>(weight) + head * sizes.weight_stride,
                                              static_cast<T*>(out) + token * sizes.out_stride + at, n, eps,
                                              thread_scratch(n));
    }
}

template <class T, class W>
auto gated_rms_norm_of(bool sigmoid, bool first) {
    if (sigmoid) return first ? gated_rms_norm_by<T, W, true, true> : gated_rms_norm_by<T, W, true, false>;
    return first ? gated_rms_norm_by<T, W, false, true> : gated_rms_norm_by<T, W, false, false>;
}

template <class T>
void gated_rms_norm(int weight_dtype, bool sigmoid, bool first, const GatedSizes& sizes, const void* x,
                    const void* gate, const void* weight, void* out, int64_t tokens, float eps, int threads) {
    bool wide = static_cast<DType>(weight_dtype) == DType::F32;
    auto run = wide ? gated_rms_norm_of<T, float>(sigmoid, first) : gated_rms_norm_of<T, T>(sigmoid, first);
    run(sizes, x, gate, weight, out, tokens, eps, threads);
}

}  // namespace baton

extern "C" {

// weight is float32 or of the type of all others. x [rows, n]; residual [rows, n] or null; total (written where there is a residual) and out [rows, n] contiguous.
void baton_rms_norm(int dtype, int weight_dtype, const void* x, int64_t x_stride, const void* residual,
                    int64_t residual_stride, const void* weight, void* total, void* out, int64_t rows, int64_t n, float eps, int threads) {
    BATON_DISPATCH(dtype, baton::rms_norm, weight_dtype, x, x_stride, residual, residual_stride, weight, total, out, rows, n, eps,
                   threads)
}

// x, gate and out [tokens, heads, dim] with the strides of `GatedSizes`; weight [dim], or [heads, dim], is float32 or of
// the type of all others. sigmoid: the gate is sigmoid(z), not z sigmoid(z). first: it comes before the norm.
void baton_gated_rms_norm(int dtype, int weight_dtype, int sigmoid, int first, const int64_t* sizes, const void* x,
                          const void* gate, const void* weight, void* out, int64_t tokens, float eps, int threads) {
    const auto& given = *reinterpret_cast<const baton::GatedSizes*>(sizes);
    BATON_DISPATCH(dtype, baton::gated_rms_norm, weight_dtype, sigmoid, first, given, x, gate, weight, out, tokens, eps,
                   threads)
}

}

BATON_RECORDABLE(baton_rms_norm)
BATON_RECORDABLE(baton_gated_rms_norm)
