// Sixteen floats at a time, on any CPU.
//
// Written with the compiler's vector extension: it becomes AVX-512, AVX2, NEON or plain code. Intrinsics appear only
// for what the extension cannot express: conversions here, the bfloat16 dot product in dot_tile.h. Compilers keep
// vectors that are wider than the CPU's in memory. So hot loops are written for a `Register`; sixteen floats are one or
// several of them.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace baton {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
typedef float Register __attribute__((vector_size(REGISTER_LANES * sizeof(float))));
typedef int32_t IntRegister __attribute__((vector_size(REGISTER_LANES * sizeof(int32_t))));
typedef uint32_t WordRegister __attribute__((vector_size(REGISTER_LANES * sizeof(uint32_t))));
typedef uint16_t HalfRegister __attribute__((vector_size(REGISTER_LANES * sizeof(uint16_t))));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

#if defined(__aarch64__)
typedef __fp16 Half;  // g++ has _Float16 there from version 13 on
#else
typedef _Float16 Half;
#endif

enum class DType : int { F32 = 0, BF16 = 1, F16 = 2 };  // numbers shared with native/__init__.py

inline f32x16 splat(float x) { return x - f32x16{}; }
inline Register splat_register(float x) { return x - Register{}; }

template <class V> inline V load_bytes(const void* p) { V v; std::memcpy(&v, p, sizeof(V)); return v; }
template <class V> inline void store_bytes(void* p, V v) { std::memcpy(p, &v, sizeof(V)); }

// ---- comparisons ----------------------------------------------------------------------------------------------------

// Compilers compare vectors wider than the CPU's element by element, so without AVX-512, halves are compared.
#if defined(__AVX512F__)
inline i32x16 greater(f32x16 a, f32x16 b) { return a > b; }
inline i32x16 at_least(f32x16 a, f32x16 b) { return a >= b; }
inline i32x16 not_a_number(f32x16 a) { return a != a; }
inline f32x16 choose(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }
inline bool any(i32x16 mask) { return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0; }
#else
inline IntRegister greater(Register a, Register b) { return a > b; }
inline Register choose(IntRegister mask, Register yes, Register no) { return mask ? yes : no; }

// The function of sixteen floats that is `function` of each register of them.
template <class Function> inline f32x16 by_register(f32x16 v, Function function) {
    Register parts[LANES / REGISTER_LANES];
    std::memcpy(parts, &v, sizeof v);
#pragma GCC unroll 4
    for (Register& part : parts) part = function(part);
    return load_bytes<f32x16>(parts);
}

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef int64_t i64x4 __attribute__((vector_size(32)));

struct Halves {
    f32x8 half[2];
    explicit Halves(f32x16 v) { std::memcpy(half, &v, sizeof v); }
};

inline i32x16 greater(f32x16 a, f32x16 b) {
    Halves x(a), y(b);
    i32x8 masks[2] = {x.half[0] > y.half[0], x.half[1] > y.half[1]};
    return load_bytes<i32x16>(masks);
}

inline i32x16 at_least(f32x16 a, f32x16 b) {
    Halves x(a), y(b);
    i32x8 masks[2] = {x.half[0] >= y.half[0], x.half[1] >= y.half[1]};
    return load_bytes<i32x16>(masks);
}

inline i32x16 not_a_number(f32x16 a) {
    Halves x(a);
    i32x8 masks[2] = {x.half[0] != x.half[0], x.half[1] != x.half[1]};
    return load_bytes<i32x16>(masks);
}

inline f32x16 choose(i32x16 mask, f32x16 yes, f32x16 no) {
    return reinterpret_cast<f32x16>((mask & reinterpret_cast<i32x16>(yes)) | (~mask & reinterpret_cast<i32x16>(no)));
}

inline bool any(i32x16 mask) {
    i64x4 halves[2];
    std::memcpy(halves, &mask, sizeof mask);
    i64x4 either = halves[0] | halves[1];
    return (either[0] | either[1] | either[2] | either[3]) != 0;
}
#endif

// b if either is NaN: pass the bound as a to let NaN through.
inline f32x16 max(f32x16 a, f32x16 b) { return choose(greater(a, b), a, b); }
#if !defined(__AVX512F__)
inline Register max(Register a, Register b) { return choose(greater(a, b), a, b); }
#endif

// ---- over the lanes -------------------------------------------------------------------------------------------------

// Combines all lanes, in the order of a binary tree; every lane of the result holds it.
template <class Combine> inline f32x16 fold(f32x16 v, Combine combine) {
    v = combine(v, __builtin_shuffle(v, i32x16{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = combine(v, __builtin_shuffle(v, i32x16{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = combine(v, __builtin_shuffle(v, i32x16{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    return combine(v, __builtin_shuffle(v, i32x16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
}

inline float sum(f32x16 v) { return fold(v, [](f32x16 a, f32x16 b) { return a + b; })[0]; }
inline f32x16 maximum(f32x16 v) { return fold(v, [](f32x16 a, f32x16 b) { return max(a, b); }); }

// The same as one float; of a register.
inline float greatest(Register v) {
#if defined(__AVX512F__)
    return maximum(v)[0];
#else
    float best = v[0];
#pragma GCC unroll 8
    for (int i = 1; i < REGISTER_LANES; i++) best = best > v[i] ? best : v[i];
    return best;
#endif
}

// ---- conversions ----------------------------------------------------------------------------------------------------

inline f32x16 to_float(u16x16 raw, bf16) {
    return reinterpret_cast<f32x16>(__builtin_convertvector(raw, u32x16) << 16);
}

inline u16x16 from_float(f32x16 v, bf16) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else  // round to nearest, ties to even; a NaN stays one
    u32x16 bits = reinterpret_cast<u32x16>(v);
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u32x16 nan = reinterpret_cast<u32x16>(not_a_number(v));
    return __builtin_convertvector((nan & ((bits >> 16) | 0x40u)) | (~nan & rounded), u16x16);
#endif
}

inline f32x16 to_float(u16x16 raw, f16) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps((__m256i)raw);
#else  // shift exponent and mantissa into place, then multiply by 2^112: exact for subnormals too
    u32x16 bits = __builtin_convertvector(raw, u32x16);
    u32x16 magnitude = (bits & 0x7fffu) << 13;
    f32x16 scaled = reinterpret_cast<f32x16>(magnitude) * splat(0x1p112f);
    u32x16 special = reinterpret_cast<u32x16>(magnitude >= (0x7c00u << 13));
    u32x16 value = (special & (magnitude | 0x7f800000u)) | (~special & reinterpret_cast<u32x16>(scaled));
    return reinterpret_cast<f32x16>(value | ((bits & 0x8000u) << 16));
#endif
}

inline u16x16 from_float(f32x16 v, f16) {
#if defined(__AVX512F__)
    return (u16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    u16x16 out;
    __m256 halves[2];
    std::memcpy(halves, &v, sizeof v);
    __m128i packed[2] = {_mm256_cvtps_ph(halves[0], 0), _mm256_cvtps_ph(halves[1], 0)};
    std::memcpy(&out, packed, sizeof out);
    return out;
#else
    u16x16 out;
    for (int i = 0; i < LANES; i++) {
        Half half = static_cast<Half>(v[i]);
        uint16_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        out[i] = bits;
    }
    return out;
#endif
}

template <class T> inline f32x16 load(const T* p) { return to_float(load_bytes<u16x16>(p), T{}); }
template <> inline f32x16 load(const float* p) { return load_bytes<f32x16>(p); }
template <class T> inline void store(T* p, f32x16 v) { store_bytes(p, from_float(v, T{})); }
template <> inline void store(float* p, f32x16 v) { store_bytes(p, v); }

// The first n (< 16) elements; the other lanes are zero.
template <class T> inline f32x16 load_first(const T* p, int n) {
    T lanes[LANES] = {};
    std::memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}
template <class T> inline void store_first(T* p, f32x16 v, int n) {
    T lanes[LANES];
    store(lanes, v);
    std::memcpy(p, lanes, n * sizeof(T));
}

// Calls body(i, lanes) for every group of `lanes` elements from i on: sixteen of n elements, and the rest at last.
template <class Body> inline void for_lanes(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) body(i, LANES);
    if (i < n) body(i, static_cast<int>(n - i));
}
template <class T> inline f32x16 load_upto(const T* p, int n) { return n == LANES ? load(p) : load_first(p, n); }
template <class T> inline void store_upto(T* p, f32x16 v, int n) {
    if (n == LANES) store(p, v); else store_first(p, v, n);
}

// ---- e^x ------------------------------------------------------------------------------------------------------------

// Within 2 units in the last place for -87 <= x <= 88, the value at the border beyond; e^0 is exactly 1, NaN stays.
// x = n ln 2 + r with |r| <= ln 2 / 2, then a polynomial for e^r (minimax, as in the Cephes library's expf).
inline Register exponential(Register x) {
    x = max(splat_register(-87.0f), x);
    x = choose(greater(x, splat_register(88.0f)), splat_register(88.0f), x);
    const Register rounder = splat_register(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    Register shifted = x * 1.44269504088896341f + rounder;
    IntRegister exponent = reinterpret_cast<IntRegister>(shifted) - reinterpret_cast<IntRegister>(rounder);
    Register n = shifted - rounder;
    Register r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Register p = splat_register(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return reinterpret_cast<Register>(reinterpret_cast<IntRegister>(p) + (exponent << 23));
}
#if !defined(__AVX512F__)
inline f32x16 exponential(f32x16 x) { return by_register(x, [](Register part) { return exponential(part); }); }
#endif

// 2^x within 2 units in the last place for x <= 127; 2^0 is exactly 1; below -126 some number of at most 2^-126.
// x = n + r with |r| <= 1/2, then a polynomial for 2^r (fitted on Chebyshev nodes, relative error 2e-9).
inline Register power_of_two(Register x) {
    x = max(splat_register(-126.0f), x);
#if defined(__AVX512F__)
    Register n = (Register)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Register rounder = splat_register(12582912.0f);
    Register shifted = x + rounder, n = shifted - rounder;
#endif
    Register r = x - n;
    Register p = splat_register(1.546144746e-04f);
    p = p * r + 1.339086735e-03f;
    p = p * r + 9.618056670e-03f;
    p = p * r + 5.550357104e-02f;
    p = p * r + 2.402265092e-01f;
    p = p * r + 6.931471880e-01f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (Register)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    IntRegister exponent = reinterpret_cast<IntRegister>(shifted) - reinterpret_cast<IntRegister>(rounder);
    return reinterpret_cast<Register>(reinterpret_cast<IntRegister>(p) + (exponent << 23));
#endif
}
#if !defined(__AVX512F__)
inline f32x16 power_of_two(f32x16 x) { return by_register(x, [](Register part) { return power_of_two(part); }); }
#endif

// Within 4 units in the last place; NaN stays. 1 - 2 / (e^2x + 1), and near 0, where that cancels, a polynomial (minimax,
// as in the Cephes library's tanhf).
inline f32x16 tanh(f32x16 x) {
    f32x16 square = x * x;
    f32x16 near = splat(-5.70498872745e-3f);
    near = near * square + 2.06390887954e-2f;
    near = near * square - 5.37397155531e-2f;
    near = near * square + 1.33314422036e-1f;
    near = near * square - 3.33332819422e-1f;
    near = near * square * x + x;
    return choose(greater(splat(0.625f * 0.625f), square), near, 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f));
}

// x * sigmoid(z). Where z < -88 the factor is smaller than 1e-38: zero, also for z so low that they would outgrow e^88.
inline f32x16 times_sigmoid(f32x16 x, f32x16 z) {
    f32x16 result = x / (1.0f + exponential(-z));
    return choose(greater(splat(-88.0f), z), f32x16{}, result);
}

// ln(1 + e^x) within some units in the last place; NaN stays. max(x, 0) + ln(1 + y), y = e^-|x|, which is
// 2 artanh(s) = 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = y / (2 + y) <= 1 / 3.
inline f32x16 softplus(f32x16 x) {
    f32x16 y = exponential(choose(greater(x, f32x16{}), -x, x));
    f32x16 s = y / (2.0f + y), square = s * s, p = splat(1.0f / 17);
    for (int odd = 15; odd > 0; odd -= 2) p = p * square + 1.0f / static_cast<float>(odd);
    return max(f32x16{}, x) + 2.0f * s * p;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

// Memory for this many floats, aligned to a cache line, which a thread keeps from call to call.
inline float* thread_scratch(int64_t floats) {
    struct Free { void operator()(float* p) const { std::free(p); } };
    static thread_local std::unique_ptr<float, Free> memory;
    static thread_local int64_t size = 0;
    if (size < floats) {
        int64_t bytes = (floats * static_cast<int64_t>(sizeof(float)) + 63) / 64 * 64;
        memory.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
        size = floats;
    }
    return memory.get();
}

}  // namespace baton

// Calls function<T>(args...) for the element type with number `dtype`.
#define BATON_DISPATCH(dtype, function, ...)                                    \
    switch (static_cast<baton::DType>(dtype)) {                                 \
        case baton::DType::F32: function<float>(__VA_ARGS__); break;            \
        case baton::DType::BF16: function<baton::bf16>(__VA_ARGS__); break;     \
        case baton::DType::F16: function<baton::f16>(__VA_ARGS__); break;       \
    }
