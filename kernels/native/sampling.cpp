// Drawing tokens: truncation, temperature, Gumbel noise and argmax of a row of logits; penalties before it.
//
// The noise of a token is a hash of (seed, position, token) followed by two logarithms. For nearly all tokens,
// a cheap upper bound of the noise shows that they lose; only tokens that might win are computed exactly.
#include <algorithm>
#include <cmath>
#include <vector>

#include "logits.h"
#include "noise.h"
#include "truncation.h"

// Draws equal those of sampling/reference.py to the bit, so no product may be fused with a sum.
#pragma GCC optimize("fp-contract=off")

namespace baton {

constexpr float GREEDY_BELOW = 1e-5f;  // shared with sampling/batch.py

// ---- draws ----------------------------------------------------------------------------------------------------------

constexpr int64_t NO_TOKEN = -1;  // shared with sampling/batch.py

int64_t first_index_of(const float* logits, int64_t n, float value) {
    return value == -INFINITE ? NO_TOKEN : std::find(logits, logits + n, value) - logits;
}

// The token of the greatest logit / temperature + noise among the logits from `floor` upwards; the lowest of equal ones.
int64_t draw(const float* logits, int64_t n, float floor, float best, float temperature, const NoiseKey& key) {
    const float inverse = 1 / temperature;
    int64_t winner = first_index_of(logits, n, best);
    double winning = -std::numeric_limits<double>::infinity();
    u32x16 words[WORDS];
    auto score = [&](float x, uint32_t word) { return (double)x / temperature + gumbel(word); };
    // Tokens that cannot exceed `goal` are skipped. The margin covers the rounding errors of float bounds.
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
