// silu(gate) * up over rows of [gate, up]: the gated activation.
#include "cpu_graph.h"
#include "vec.h"

namespace baton {

// Below -88 the result is smaller than 1e-36: zero, also for gates so large that they would outgrow e^88.
inline f32x16 silu(f32x16 x) {
    f32x16 result = x / (1.0f + exponential(-x));
    return choose(greater(splat(-88.0f), x), f32x16{}, result);
}

template <class T>
void silu_and_mul(const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n, int threads) {
    constexpr int64_t SPAN = 1024;  // elements a task: also a single wide row is shared out
    int64_t spans = (n + SPAN - 1) / SPAN;
    bool parallel = rows * n >= 65536;  // below that, waking threads takes longer
#pragma omp parallel for num_threads(threads) if (parallel)
    for (int64_t task = 0; task < rows * spans; task++) {
        int64_t row = task / spans, begin = task % spans * SPAN;
        const T* gate = static_cast<const T*>(gate_up) + row * stride + begin;
        const T* up = gate + n;
        T* to = static_cast<T*>(out) + row * n + begin;
        for_lanes(n - begin < SPAN ? n - begin : SPAN, [&](int64_t i, int lanes) {
            store_upto(to + i, silu(load_upto(gate + i, lanes)) * load_upto(up + i, lanes), lanes);
        });
    }
}

}  // namespace baton

extern "C" {

// gate_up [rows, 2 n] with `stride` elements from row to row, out [rows, n] contiguous.
void baton_silu_and_mul(int dtype, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n,
                        int threads) {
    BATON_DISPATCH(dtype, baton::silu_and_mul, gate_up, stride, out, rows, n, threads)
}

}

BATON_RECORDABLE(baton_silu_and_mul)
