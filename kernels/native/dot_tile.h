// The matrix product behind all heavy ops: R rows of A times 16 * NV columns of B, in registers.
//
//     C[r][n] = alpha[r] * C[r][n] + sum over k of A[r][k] * B[k][n]
//
// Every element of C is one chain of multiply-adds in the order of k, for any R and NV. So a row's result does not
// depend on other rows.
//
// `Pairs` is AVX512-BF16: one instruction multiplies pairs of bfloat16 and adds both products to a float. B has pairs
// of consecutive k, [k / 2][n][2]. `Floats` and `Widening` are for everything else, B is [k][n].
#pragma once
#include <type_traits>

#include "vec.h"

namespace baton {

// The vectors of columns that a tile of R rows, 6 at most, takes: enough sums to hide the time of a multiply-add, few
// enough for the registers.
#if defined(__AVX512F__)
template <int R> constexpr int TILE_VECTORS = 4;  // with 6 rows: 24 sums, 4 columns and 1 row in 32 registers
#else
template <int R> constexpr int TILE_VECTORS = R <= 3 ? 2 : 1;  // with 6 rows and AVX: 12 sums, 2 columns and 1 row in 16
#endif

template <class T> inline Register load_register(const T* p);
template <> inline Register load_register(const float* p) { return load_bytes<Register>(p); }
template <> inline Register load_register(const bf16* p) {
    return reinterpret_cast<Register>(__builtin_convertvector(load_bytes<HalfRegister>(p), WordRegister) << 16);
}

template <> inline Register load_register(const f16* p) {
#if defined(__AVX512F__)
    return load(p);
#elif defined(__F16C__)
    return (Register)_mm256_cvtph_ps(load_bytes<__m128i>(p));
#else
    f16 lanes[LANES] = {};
    std::memcpy(lanes, p, REGISTER_LANES * sizeof(f16));
    const f32x16 all = load(lanes);
    return load_bytes<Register>(&all);
#endif
}
inline void store_register(float* p, Register v) { store_bytes(p, v); }
#if defined(__AVX512F__)
inline void store_register(bf16* p, Register v) { store(p, v); }
#endif

#if defined(__AVX512BF16__)
#define BATON_HAS_PAIRS 1

struct Pairs {
    using T = bf16;
    using Column = bf16;
    using Vector = __m512bh;
    static constexpr int WIDTH = 2;  // elements of k in one step
    static Vector load(const T* p) { return (Vector)_mm512_loadu_si512(p); }
    static Vector broadcast(const T* p) {
        int32_t pair;
        std::memcpy(&pair, p, sizeof pair);
        return (Vector)_mm512_set1_epi32(pair);
    }
    static Register multiply_add(Register c, Vector a, Vector b) { return (Register)_mm512_dpbf16_ps((__m512)c, a, b); }
};
#else
#define BATON_HAS_PAIRS 0
#endif

// Rows of floats; columns are converted to floats as they are read.
template <class C> struct Widening {
    using T = float;
    using Column = C;
    using Vector = Register;
    static constexpr int WIDTH = 1;
    static Vector load(const Column* p) { return load_register(p); }
    static Vector broadcast(const T* p) { return *p - Register{}; }
    static Register multiply_add(Register c, Vector a, Vector b) { return a * b + c; }
};

using Floats = Widening<float>;

// The sums over k (`steps` steps of Op::WIDTH elements) of one tile, added to `acc`. `ldb` counts elements of B per step.
// Meanwhile, memory that is needed next is prefetched from `prefetch` on, `prefetch_stride` bytes per step.
template <class Op, int R, int NV>
inline void accumulate(f32x16 (&acc)[R][NV], const typename Op::T* a, int64_t lda, const typename Op::Column* b,
                       int64_t ldb, int64_t steps, const char* prefetch = nullptr, int64_t prefetch_stride = 0) {
    constexpr int PARTS = NV * LANES / REGISTER_LANES;
    Register sums[R][PARTS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < PARTS; v++) sums[r][v] = load_bytes<Register>(reinterpret_cast<Register*>(acc[r]) + v);
    for (int64_t k = 0; k < steps; k++) {
        typename Op::Vector columns[PARTS];
#pragma GCC unroll 8
        for (int v = 0; v < PARTS; v++) columns[v] = Op::load(b + k * ldb + v * REGISTER_LANES * Op::WIDTH);
        if (prefetch_stride != 0) __builtin_prefetch(prefetch + k * prefetch_stride, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            typename Op::Vector row = Op::broadcast(a + r * lda + k * Op::WIDTH);
#pragma GCC unroll 8
            for (int v = 0; v < PARTS; v++) sums[r][v] = Op::multiply_add(sums[r][v], row, columns[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < PARTS; v++) store_bytes(reinterpret_cast<Register*>(acc[r]) + v, sums[r][v]);
}

// Calls body with the constant `rows`, 1 <= rows <= MAX, so that it can unroll.
template <int MAX, class Body> inline void with_rows(int rows, Body body) {
    if constexpr (MAX > 1) {
        if (rows < MAX) return with_rows<MAX - 1>(rows, body);
    }
    body(std::integral_constant<int, MAX>{});
}

}  // namespace baton
