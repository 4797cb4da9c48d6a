// Gumbel noise of a token, as a function of (seed, position, token): hashes, then logarithms. And an upper bound of the
// noise of a group of tokens that costs no logarithm. See sampling/noise.py.
#pragma once
#include <cmath>

#include "vec.h"

// Draws equal those of sampling/reference.py to the bit, so no product may be fused with a sum.
#pragma GCC optimize("fp-contract=off")

namespace baton {

constexpr int MEMBERS = 8;        // tokens of a group
constexpr int GROUP_LANES = 256;  // tokens between two members of a group
constexpr int TILE = MEMBERS * GROUP_LANES;

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
inline void philox(u64x8 counter, const NoiseKey& key, uint32_t level, u64x8 out[4]) {
    u64x8 c0 = counter, c1 = u64x8{} + key.position[0], c2 = u64x8{} + key.position[1], c3 = u64x8{} + level;
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

// The words of level 0 of 32 successive groups, in their order; `group` is a multiple of 32.
inline void first_words(int64_t group, const NoiseKey& key, u32x16 out[2]) {
    u64x8 by_counter[4];
    philox(u64x8{0, 1, 2, 3, 4, 5, 6, 7} + (uint64_t)(group / 4), key, 0, by_counter);
    u64x8 even = (by_counter[0] & 0xffffffffu) | (by_counter[1] << 32);  // words 0 and 1 of each counter
    u64x8 odd = (by_counter[2] & 0xffffffffu) | (by_counter[3] << 32);
    out[0] = reinterpret_cast<u32x16>(__builtin_shuffle(even, odd, u64x8{0, 8, 1, 9, 2, 10, 3, 11}));
    out[1] = reinterpret_cast<u32x16>(__builtin_shuffle(even, odd, u64x8{4, 12, 5, 13, 6, 14, 7, 15}));
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

// -log u for u = (digits + 1/2) / 2^bits.
inline double exponential_number(uint32_t digits, int bits) {
    return -portable_log((digits + 0.5) / (double)(1ull << bits));
}

// The least of eight exponential numbers, from a word of level 0 or 1; and a number that is at most that, without a
// logarithm: -log u >= 1 - u, and the 29 digits of 1 - u are those of u inverted, followed by a half.
inline double least(uint32_t word) { return exponential_number(word / MEMBERS, 29) / MEMBERS; }
inline f32x16 lower_bound_of_least(u32x16 words) {
    u32x16 digits = ~(words | (uint32_t)(MEMBERS - 1)) | (uint32_t)(MEMBERS / 2);
    // Converted as signed numbers, of which every CPU can convert a vector.
    return __builtin_convertvector(reinterpret_cast<i32x16>(digits >> 1), f32x16) * 0x1p-34f;
}
inline float lower_bound_of_least(uint32_t word) { return (~(word | (MEMBERS - 1)) | (MEMBERS / 2)) * 0x1p-35f; }

// At least -log x: log2 of a float is at least its bits read as a fixed-point number, since 2^f <= 1 + f between powers
// of two.
inline f32x16 minus_log_bound(f32x16 x) {
    return (float)M_LN2 * (127 - __builtin_convertvector(reinterpret_cast<i32x16>(x), f32x16) * 0x1p-23f);
}
inline float minus_log_bound(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (float)M_LN2 * (127 - bits * 0x1p-23f);
}

// The random numbers of one group, computed as they are needed.
class GroupNoise {
public:
    GroupNoise(int64_t group, uint32_t first_word, const NoiseKey& k)
        : key(k), token(group / GROUP_LANES * TILE + group % GROUP_LANES), first(first_word) {
        u64x8 words[4];
        philox(u64x8{} + (uint64_t)(group / 4), key, 1, words);
        second = (uint32_t)words[group % 4][0];
    }

    int holder() const { return first % MEMBERS; }  // the member with the most noise
    float bound_of_holder() const { return minus_log_bound(lower_bound_of_least(first)); }
    float bound_of_others() const {
        return minus_log_bound(lower_bound_of_least(first) + lower_bound_of_least(second));
    }

    double of(int member) {
        if (member == holder()) return -portable_log(least(first));
        double rest = 0;
        if (member != (int)(second % MEMBERS)) {
            if (!has_third) {
                u64x8 counters = (u64x8{0, 1, 2, 3, 4, 5, 6, 7} * GROUP_LANES + (uint64_t)token) / 4;
                philox(counters, key, 2, third);
                has_third = true;
            }
            rest = exponential_number((uint32_t)third[token % 4][member], 32);
        }
        return -portable_log(least(first) + (least(second) + rest));
    }

private:
    const NoiseKey& key;
    int64_t token;  // of member 0
    uint32_t first, second;
    u64x8 third[4];
    bool has_third = false;
};

constexpr float GREATEST_NOISE = 22.9f;  // 33 log 2, rounded up

}  // namespace baton
