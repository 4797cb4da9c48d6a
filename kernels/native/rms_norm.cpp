// RMSNorm of rows, with the residual addition before it. A row is one thread's, so its result does not depend on others.
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

// total = x + residual, rounded; the squares are those of what was rounded.
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

}  // namespace baton

extern "C" {

// weight is float32 or of the type of all others. x [rows, n]; residual [rows, n] or null; total (written where there is a residual) and out [rows, n] contiguous.
void baton_rms_norm(int dtype, int weight_dtype, const void* x, int64_t x_stride, const void* residual,
                    int64_t residual_stride, const void* weight, void* total, void* out, int64_t rows, int64_t n, float eps, int threads) {
    BATON_DISPATCH(dtype, baton::rms_norm, weight_dtype, x, x_stride, residual, residual_stride, weight, total, out, rows, n, eps,
                   threads)
}

}

BATON_RECORDABLE(baton_rms_norm)
