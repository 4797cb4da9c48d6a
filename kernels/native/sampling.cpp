// Drawing tokens: truncation, temperature, Gumbel noise and argmax of a row of logits; penalties before it.
//
// The noise of a token is a hash of (seed, position, token) followed by two logarithms. Nearly all tokens lose whatever
// their logarithms are: a cheap upper bound of the noise shows it, and only those that might win are computed exactly.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "logits.h"

// Draws equal those of sampling/reference.py to the bit, so no product may be fused with a sum.
#pragma GCC optimize("fp-contract=off")

namespace baton {

constexpr int GROUP = 64;  // tokens that share counters, see sampling/noise.py
constexpr int WORDS = GROUP / LANES;
constexpr float GREEDY_BELOW = 1e-5f;  // shared with sampling/batch.py

typedef uint64_t u64x8 __attribute__((vector_size(64)));

// ---- noise ----------------------------------------------------------------------------------------------------------

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

// Philox-4x32-10 of eight counters. Words live in the low halves of the lanes; what the high halves hold does not matter.
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

// ---- truncation -----------------------------------------------------------------------------------------------------

// The k-th greatest logit; minus infinity where fewer are above it.
float kth_greatest(const float* logits, int64_t n, int64_t k) {
    static thread_local std::vector<float> best;
    const int64_t full = 2 * k + 256;
    best.resize(full + LANES);
    int64_t held = 0;
    float floor = -INFINITE;
    auto cut = [&] {
        std::nth_element(best.begin(), best.begin() + (k - 1), best.begin() + held, std::greater<float>());
        held = k;
        floor = best[k - 1];
    };
    for (int64_t i = 0; i < n; i += LANES) {
        f32x16 x = load_logits(logits, i, n);
        held += pack_lanes(x, greater(x, splat(floor)), &best[held]);
        if (held >= full) cut();
    }
    if (held < k) return -INFINITE;
    cut();
    return floor;
}

struct Weighted { float logit, weight; };

// The logit at which the weights of those above and at it first reach `goal`; reorders `tokens`.
float weighted_quantile(std::vector<Weighted>& tokens, double goal) {
    auto begin = tokens.begin(), end = tokens.end();
    double above = 0;
    float answer = -INFINITE;
    while (begin != end) {
        float pivot = begin[(end - begin) / 2].logit;
        auto middle = std::partition(begin, end, [&](const Weighted& t) { return t.logit > pivot; });
        auto below = std::partition(middle, end, [&](const Weighted& t) { return t.logit == pivot; });
        double greater = 0, equal = 0;
        for (auto t = begin; t != middle; t++) greater += t->weight;
        for (auto t = middle; t != below; t++) equal += t->weight;
        if (above + greater >= goal) {
            end = middle;
        } else {
            answer = pivot;
            if (above + greater + equal >= goal) break;
            above += greater + equal;
            begin = below;
        }
    }
    return answer;
}

struct Mass {
    double weight;
    int64_t count;
};

// What the logits from `floor` upwards weigh. `weights` is padded to whole vectors.
Mass mass_from(const float* logits, const float* weights, int64_t n, float floor) {
    Mass mass{0, 0};
    for (int64_t i = 0; i < n;) {
        f32x16 weight = {};  // short float sums into a double: the error stays that of single weights
        i32x16 count = {};
        for (int64_t stop = std::min(n, i + 32 * LANES); i < stop; i += LANES) {
            i32x16 above = at_least(load_logits(logits, i, n), splat(floor));
            weight += choose(above, load(weights + i), f32x16{});
            count -= above;
        }
        mass.weight += sum(weight);
        for (int lane = 0; lane < LANES; lane++) mass.count += count[lane];
    }
    return mass;
}

constexpr int64_t FEW = 512;      // tokens to select among one by one
constexpr int MOST_HALVINGS = 32;  // of the range of logits: where many are equal, they never become few

// Where top-p ends among the logits from `floor` upwards: halves the range that the end lies in, then selects.
float nucleus_floor(const float* logits, int64_t n, float best, float floor, float temperature, float top_p) {
    static thread_local std::vector<float> weights;
    weights.resize((n + LANES - 1) / LANES * LANES);
    const float inverse = 1 / temperature;
    for (int64_t i = 0; i < n; i += LANES)
        store(&weights[i], exponential((load_logits(logits, i, n) - best) * inverse));
    Mass all = mass_from(logits, weights.data(), n, floor), lower = all, upper{0, 0};
    const double goal = top_p * all.weight;
    // Tokens lighter than this make up less than 1 - top_p all together, so the nucleus ends above them.
    double light = (1 - (double)top_p) * all.weight / n;
    float low = std::max(floor, (float)(best + temperature * (std::log(light) - 1e-3)));
    float high = std::nextafter(best, INFINITE);
    for (int halving = 0; lower.count - upper.count > FEW && halving < MOST_HALVINGS; halving++) {
        float middle = low + (high - low) / 2;
        Mass mass = mass_from(logits, weights.data(), n, middle);
        if (mass.weight >= goal) low = middle, lower = mass;
        else high = middle, upper = mass;
    }
    static thread_local std::vector<Weighted> tokens;
    tokens.clear();
    for (int64_t i = 0; i < n; i += LANES) {
        f32x16 x = load_logits(logits, i, n);
        i32x16 between = at_least(x, splat(low)) & greater(splat(high), x);
        if (!any(between)) continue;
        for (int lane = 0; lane < LANES; lane++)
            if (between[lane]) tokens.push_back({x[lane], weights[i + lane]});
    }
    return weighted_quantile(tokens, goal - upper.weight);
}

struct Truncation {
    int64_t top_k;
    float top_p, min_p;
};

// The smallest float that is not below x.
inline float round_up(double x) {
    float f = (float)x;
    return f < x ? std::nextafter(f, INFINITE) : f;
}

float truncation_floor(const float* logits, int64_t n, float best, float temperature, const Truncation& by) {
    float floor = -INFINITE;
    if (by.min_p > 0) floor = round_up(best + (double)temperature * std::log((double)by.min_p));
    if (by.top_k > 0 && by.top_k < n) floor = std::max(floor, kth_greatest(logits, n, by.top_k));
    if (by.top_p < 1) floor = std::max(floor, nucleus_floor(logits, n, best, floor, temperature, by.top_p));
    return floor;
}

// ---- draws ----------------------------------------------------------------------------------------------------------

int64_t first_index_of(const float* logits, int64_t n, float value) {
    return value == -INFINITE ? 0 : std::find(logits, logits + n, value) - logits;
}

// The token of the greatest logit / temperature + noise among the logits from `floor` upwards; the lowest of equal ones.
int64_t draw(const float* logits, int64_t n, float floor, float best, float temperature, const NoiseKey& key) {
    const float inverse = 1 / temperature;
    int64_t winner = first_index_of(logits, n, best);
    double winning = -std::numeric_limits<double>::infinity();
    u32x16 words[WORDS];
    auto score = [&](float x, uint32_t word) { return (double)x / temperature + gumbel(word); };
    // Tokens that cannot exceed `goal` are passed over. The margin covers what the float bounds round.
    float goal, need;
    double aimed;
    auto aim = [&](double reached) {
        aimed = reached;
        goal = (float)(reached - 1e-3 - 1e-6 * std::fabs(reached));
        need = std::max(floor, (goal - GREATEST_NOISE) * temperature);
    };
    random_words(winner / GROUP, key, words);
    int64_t lane_of_best = winner % GROUP;
    aim(score(best, words[lane_of_best / LANES][lane_of_best % LANES]));
    for (int64_t group = 0; group * GROUP < n; group++) {
        f32x16 x[WORDS];
        i32x16 possible = {};
#pragma GCC unroll 4
        for (int w = 0; w < WORDS; w++) {
            x[w] = load_logits(logits, group * GROUP + w * LANES, n);
            possible |= at_least(x[w], splat(need));
        }
        if (!any(possible)) continue;
        random_words(group, key, words);
        i32x16 contends[WORDS], contest = {};
#pragma GCC unroll 4
        for (int w = 0; w < WORDS; w++) {
            contends[w] = at_least(x[w], splat(floor)) & greater(x[w] * inverse + gumbel_bound(words[w]), splat(goal));
            contest |= contends[w];
        }
        if (!any(contest)) continue;
        for (int i = 0; i < GROUP; i++) {
            int w = i / LANES, lane = i % LANES;
            if (!contends[w][lane]) continue;
            double reached = score(x[w][lane], words[w][lane]);
            if (reached <= winning) continue;
            winning = reached;
            winner = group * GROUP + i;
            aim(std::max(reached, aimed));
        }
    }
    return winner;
}

// ---- penalties ------------------------------------------------------------------------------------------------------

struct Penalty { float repetition, presence, frequency; };

constexpr int32_t IN_PROMPT = 1 << 30;

// Each token of the history once, however often it occurs. `counts` [n] is zero before and after.
template <class Token>
void penalize(float* logits, int64_t n, const Token* history, int64_t prompt, int64_t length, const Penalty& by,
              int32_t* counts) {
    auto known = [&](Token token) { return token >= 0 && token < n; };
    for (int64_t i = 0; i < length; i++)
        if (known(history[i])) counts[history[i]] = i < prompt ? IN_PROMPT : counts[history[i]] + 1;
    for (int64_t i = 0; i < length; i++) {
        if (!known(history[i]) || counts[history[i]] == 0) continue;
        int32_t in_output = counts[history[i]] & (IN_PROMPT - 1);
        counts[history[i]] = 0;
        float& x = logits[history[i]];
        x = x > 0 ? x / by.repetition : x * by.repetition;
        x -= by.frequency * (float)in_output;
        x -= in_output ? by.presence : 0.0f;
    }
}

}  // namespace baton

extern "C" {

// logits [rows, n] with `stride`; temperature, top_k, top_p, min_p [rows], null where no row uses them; out [rows].
void baton_sample(const float* logits, int64_t stride, int64_t rows, int64_t n, const float* temperature,
                  const int64_t* top_k, const float* top_p, const float* min_p, const int64_t* seeds,
                  const int64_t* positions, int64_t* out, int threads) {
    bool parallel = rows > 1 && rows * n >= 262144;  // below that, waking threads takes longer
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (parallel)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = logits + r * stride;
        float best = baton::greatest(row, n);
        bool greedy = temperature == nullptr || temperature[r] < baton::GREEDY_BELOW || best == -baton::INFINITE;
        if (greedy) {
            out[r] = baton::first_index_of(row, n, best);
            continue;
        }
        baton::Truncation by{top_k ? top_k[r] : 0, top_p ? top_p[r] : 1, min_p ? min_p[r] : 0};
        float floor = baton::truncation_floor(row, n, best, temperature[r], by);
        out[r] = baton::draw(row, n, floor, best, temperature[r], baton::NoiseKey(seeds[r], positions[r]));
    }
}

// Changes the logits of `rows` [count] in place. repetition, presence, frequency [count]; table_rows, prompt_lens and
// positions have an entry for each row of the logits; table is int64 where `wide`, else int32.
void baton_penalize(float* logits, int64_t stride, int64_t n, const int64_t* rows, int64_t count,
                    const float* repetition, const float* presence, const float* frequency, const void* table,
                    int wide, int64_t table_stride, const int64_t* table_rows, const int64_t* prompt_lens,
                    const int64_t* positions) {
    static thread_local std::vector<int32_t> counts;
    if ((int64_t)counts.size() < n) counts.assign(n, 0);
    for (int64_t i = 0; i < count; i++) {
        int64_t r = rows[i], start = table_rows[r] * table_stride;
        baton::Penalty by{repetition[i], presence[i], frequency[i]};
        auto apply = [&](const auto* tokens) {
            baton::penalize(logits + r * stride, n, tokens + start, prompt_lens[r], positions[r], by, counts.data());
        };
        if (wide) apply(static_cast<const int64_t*>(table)); else apply(static_cast<const int32_t*>(table));
    }
}

}
