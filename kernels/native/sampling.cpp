// Drawing tokens: truncation, temperature, Gumbel noise and argmax of a row of logits; penalties before it.
//
// The noise of a token is a hash of (seed, position, token) followed by logarithms. For nearly all groups of eight
// tokens, a cheap upper bound of their noise shows that they lose; only tokens that might win are computed exactly.
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
    auto score = [&](float x, double noise) { return (double)x / temperature + noise; };
    // Tokens that cannot reach `goal` are skipped. The margin covers the rounding errors of float bounds.
    float goal, need;
    auto aim = [&](double reached) {
        goal = (float)(reached - 1e-3 - 1e-6 * std::fabs(reached));
        need = std::max(floor, (goal - GREATEST_NOISE) * temperature);
    };
    u32x16 words[2];
    auto contend = [&](int64_t group, uint32_t word) {
        GroupNoise noise(group, word, key);
        int64_t first = group / GROUP_LANES * TILE + group % GROUP_LANES;
        for (int member = 0; member < MEMBERS; member++) {
            int64_t token = first + member * GROUP_LANES;
            if (token >= n || !(logits[token] >= floor)) continue;
            float bound = member == noise.holder() ? noise.bound_of_holder() : noise.bound_of_others();
            if (!(logits[token] * inverse + bound >= goal)) continue;
            double reached = score(logits[token], noise.of(member));
            if (reached < winning || (reached == winning && token > winner)) continue;
            winning = reached;
            winner = token;
            aim(reached);
        }
    };
    aim(-std::numeric_limits<double>::infinity());
    int64_t group_of_best = winner / TILE * GROUP_LANES + winner % GROUP_LANES;
    first_words(group_of_best / 32 * 32, key, words);
    contend(group_of_best, words[group_of_best % 32 / LANES][group_of_best % LANES]);
    for (int64_t group = 0; group / GROUP_LANES * TILE + group % GROUP_LANES < n; group += 2 * LANES) {
        const int64_t first = group / GROUP_LANES * TILE + group % GROUP_LANES;
        f32x16 best_of[2];
        i32x16 possible = {};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            best_of[half] = load_logits(logits, first + half * LANES, n);
#pragma GCC unroll 8
            for (int member = 1; member < MEMBERS; member++)
                best_of[half] = max(load_logits(logits, first + half * LANES + member * GROUP_LANES, n), best_of[half]);
            possible |= at_least(best_of[half], splat(need));
        }
        if (!any(possible)) continue;
        first_words(group, key, words);
        i32x16 contends[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            f32x16 bound = best_of[half] * inverse + minus_log_bound(lower_bound_of_least(words[half]));
            contends[half] = at_least(best_of[half], splat(floor)) & at_least(bound, splat(goal));
        }
        if (!any(contends[0] | contends[1])) continue;
        for (int i = 0; i < 2 * LANES; i++)
            if (contends[i / LANES][i % LANES]) contend(group + i, words[i / LANES][i % LANES]);
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
