// Gumbel noise of a token, as a function of (seed, position, token): a hash, then two logarithms. And an upper bound of
// the noise that costs no logarithm.
#pragma once
#include <cmath>

#include "vec.h"

// Draws equal those of sampling/reference.py to the bit, so no product may be fused with a sum.
#pragma GCC optimize("fp-contract=off")

namespace baton {

constexpr int GROUP = 64;  // tokens that share counters, see sampling/noise.py
constexpr int WORDS = GROUP / LANES;

typedef uint64_t u64x8 __attribute__((vector_size(64)));

// Products of the low halves of each lane.
inline u64x8 multiply_low_halves(u64x8 a, uint32_t b) {
#if defined(__AVX512F__)
    return (u64x8)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    __m256i halves[2];
    std::memcpy(halves, &a, sizeof a);
    for (__m256i& half : halves) half = _mm256_mul_epu32(half, _mm256_set1_epi64x(b));
    return load_bytes<u64x8>(halves);
#else
    return (a & 0xffffffffu) * b;
#endif
}

struct NoiseKey {
    uint32_t seed[2], position[2];
    NoiseKey(int64_t s, int64_t p)
        : seed{(uint32_t)s, (uint32_t)(s >> 32)}, position{(uint32_t)p, (uint32_t)(p >> 32)} {}
};

// Philox-4x32-10 of eight counters. Words live in the low halves of the lanes; high halves are ignored.
inline void philox(u64x8 counter, const NoiseKey& key, u64x8 out[4]) {
    u64x8 c0 = counter, c1 = u64x8{} + key.position[0], c2 = u64x8{} + key.position[1], c3 = {};
    uint32_t k0 = key.seed[0], k1 = key.seed[1];
#pragma GCC unroll 10  // vectors stay in registers only where their index is a constant: a draw is twice as fast
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        u64x8 p0 = multiply_low_halves(c0, 0xD2511F53u), p1 = multiply_low_halves(c2, 0xCD9E8D57u);
        c0 = (p1 >> 32) ^ c1 ^ (uint64_t)k0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ (uint64_t)k1;
        c3 = p0;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// The random words of the 64 tokens of a group, in the order of the tokens.
inline void random_words(int64_t group, const NoiseKey& key, u32x16 out[WORDS]) {
    const u64x8 evens = {0, 2, 4, 6, 8, 10, 12, 14};
    u64x8 even[4], odd[4];
    philox(evens + (uint64_t)group * LANES, key, even);
    philox(evens + (uint64_t)group * LANES + 1, key, odd);
#pragma GCC unroll 4
    for (int w = 0; w < WORDS; w++)
        out[w] = reinterpret_cast<u32x16>((even[w] & 0xffffffffu) | (odd[w] << 32));
}

// `portable_log` of sampling/noise.py, operation by operation.
inline double portable_log(double x) {
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < std::sqrt(0.5)) m *= 2, exponent--;
    double s = (m - 1) / (m + 1), z = s * s, series = 2.0 / 21;
    for (int term = 9; term >= 0; term--) series = series * z + 2.0 / (2 * term + 1);
    return exponent * M_LN2 + s * series;
}

inline double gumbel(uint32_t word) { return -portable_log(-portable_log((word + 0.5) * 0x1p-32)); }

// At least the Gumbel noise of each word. With v = 1 - u, -log(-log u) <= -log v; and log2 of a float is at least its
// bits read as a fixed-point number, since 1 + f <= 2^f turned around holds between powers of two.
inline f32x16 gumbel_bound(u32x16 words) {
    i32x16 half = reinterpret_cast<i32x16>(~words >> 1);
    i32x16 bits = reinterpret_cast<i32x16>(__builtin_convertvector(half, f32x16));
    return (float)M_LN2 * (31 + 127 - __builtin_convertvector(bits, f32x16) * 0x1p-23f);
}

constexpr float GREATEST_NOISE = 22.9f;  // 33 log 2, rounded up

}  // namespace baton
