// The product that everything heavy is made of: R rows of A times 16 * NV columns of B, in registers.
//
//     C[r][n] = alpha[r] * C[r][n] + sum over k of A[r][k] * B[k][n]
//
// Every element of C is one chain of multiply-adds in the order of k, whatever R and NV are. So a row's result does not
// depend on the rows beside it.
//
// `Pairs` is AVX512-BF16: one instruction multiplies pairs of bfloat16 and adds both products to a float. B holds its
// pairs side by side, [k / 2][n][2]. `Floats` is for everything else, B is [k][n].
#pragma once
#include <type_traits>

#include "vec.h"

namespace baton {

#if defined(__AVX512F__)
constexpr int TILE_VECTORS = 4;  // with 6 rows: 24 sums, 4 columns and 1 row in 32 registers
#else
constexpr int TILE_VECTORS = 1;  // sixteen floats take two or four registers of sixteen
#endif

#if defined(__AVX512BF16__)
#define BATON_HAS_PAIRS 1

struct Pairs {
    using T = bf16;
    using Vector = __m512bh;
    static constexpr int WIDTH = 2;  // elements of k in one step
    static Vector load(const T* p) { return (Vector)_mm512_loadu_si512(p); }
    static Vector broadcast(const T* p) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return (Vector)_mm512_set1_epi32(pair);
    }
    static f32x16 multiply_add(f32x16 c, Vector a, Vector b) { return (f32x16)_mm512_dpbf16_ps((__m512)c, a, b); }
};
#else
#define BATON_HAS_PAIRS 0
#endif

struct Floats {
    using T = float;
    using Vector = f32x16;
    static constexpr int WIDTH = 1;
    static Vector load(const T* p) { return baton::load(p); }
    static Vector broadcast(const T* p) { return splat(*p); }
    static f32x16 multiply_add(f32x16 c, Vector a, Vector b) { return a * b + c; }
};

// The sums over k (`steps` steps of Op::WIDTH elements) of one tile, added to `acc`. `ldb` counts elements of B per step.
// `prefetch` walks through memory that is needed next, `prefetch_stride` bytes a step.
template <class Op, int R, int NV>
inline void accumulate(f32x16 (&acc)[R][NV], const typename Op::T* a, int64_t lda, const typename Op::T* b, int64_t ldb,
                       int64_t steps, const char* prefetch = nullptr, int64_t prefetch_stride = 0) {
    for (int64_t k = 0; k < steps; k++) {
        typename Op::Vector columns[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) columns[v] = Op::load(b + k * ldb + v * LANES * Op::WIDTH);
        if (prefetch_stride != 0) __builtin_prefetch(prefetch + k * prefetch_stride, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            typename Op::Vector row = Op::broadcast(a + r * lda + k * Op::WIDTH);
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) acc[r][v] = Op::multiply_add(acc[r][v], row, columns[v]);
        }
    }
}

// Calls body with the constant `rows`, 1 <= rows <= MAX, so that it can unroll.
template <int MAX, class Body> inline void with_rows(int rows, Body body) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, body);
    }
    body(std::integral_constant<int, MAX>{});
}

}  // namespace baton
