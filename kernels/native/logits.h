// Reading a row of logits sixteen at a time.
#pragma once
#include <limits>

#include "vec.h"

namespace baton {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// ---- rows -----------------------------------------------------------------------------------------------------------

// Sixteen logits from i on; minus infinity beyond n and for NaN.
inline f32x16 load_logits(const float* logits, int64_t i, int64_t n) {
    f32x16 x = i + LANES <= n ? load(logits + i) : splat(-INFINITE);
    for (int lane = 0; i + LANES > n && lane < n - i; lane++) x[lane] = logits[i + lane];
    return choose(at_least(x, splat(-INFINITE)), x, splat(-INFINITE));
}

inline float greatest(const float* logits, int64_t n) {
    f32x16 best = splat(-INFINITE);
    for (int64_t i = 0; i < n; i += LANES) {
        f32x16 x = load_logits(logits, i, n);
        best = choose(greater(x, best), x, best);
    }
    return maximum(best)[0];
}

// Writes the lanes under `mask` to `out`, packed and in order; returns how many. `out` has room for sixteen.
inline int pack_lanes(f32x16 x, i32x16 mask, float* out) {
#if defined(__AVX512F__)
    __mmask16 lanes = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(lanes, (__m512)x));
    return __builtin_popcount(lanes);
#else
    int count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        out[count] = x[lane];
        count -= mask[lane];
    }
    return count;
#endif
}

}  // namespace baton
