// Log-probabilities of the chosen token and of the best tokens of each row, without temporaries of a row's size.
#include <algorithm>
#include <cmath>

#include "logits.h"

namespace baton {

// The k greatest logits so far, best first; of equal ones, the first token comes first. `values` and `tokens` hold k.
struct Best {
    float* values;
    int64_t* tokens;
    int64_t k, held = 0;

    float floor() const { return held < k ? -INFINITE : values[k - 1]; }

    void offer(float value, int64_t token) {
        if (held == k && value <= values[k - 1]) return;
        int64_t place = held < k ? held++ : k - 1;
        for (; place > 0 && values[place - 1] < value; place--)
            values[place] = values[place - 1], tokens[place] = tokens[place - 1];
        values[place] = value, tokens[place] = token;
    }
};

struct RowStats {
    float greatest;
    int64_t above;  // logits greater than the chosen one
};

RowStats scan(const float* row, int64_t n, float chosen, Best& best) {
    f32x16 greatest = splat(-INFINITE);
    i32x16 above = {};
    for (int64_t i = 0; i < n; i += LANES) {
        f32x16 x = load_logits(row, i, n);
        greatest = choose(greater(x, greatest), x, greatest);
        above -= greater(x, splat(chosen));
        if (best.k == 0 || (best.held == best.k && !any(greater(x, splat(best.floor()))))) continue;
        for (int lane = 0; lane < LANES && i + lane < n; lane++) best.offer(x[lane], i + lane);
    }
    int64_t count = 0;
    for (int lane = 0; lane < LANES; lane++) count += above[lane];
    return {maximum(greatest)[0], count};
}

float log_sum_exp(const float* row, int64_t n, float greatest) {
    double total = 0;
    for (int64_t i = 0; i < n;) {
        f32x16 part = {};  // short float sums into a double: the error stays that of single terms
        for (int64_t stop = std::min(n, i + 32 * LANES); i < stop; i += LANES)
            part += exponential(load_logits(row, i, n) - greatest);
        total += sum(part);
    }
    return greatest + (float)std::log(total);
}

}  // namespace baton

extern "C" {

// logits [rows, n] with `stride`; token_ids, chosen, rank [rows]; top_ids, top_logprobs [rows, k].
void baton_token_logprobs(const float* logits, int64_t stride, int64_t rows, int64_t n, const int64_t* token_ids,
                          int64_t k, float* chosen, int64_t* rank, int64_t* top_ids, float* top_logprobs,
                          int threads) {
    bool parallel = rows > 1 && rows * n >= 262144;  // below that, waking threads takes longer
#pragma omp parallel for num_threads(threads) if (parallel)
    for (int64_t r = 0; r < rows; r++) {
        const float* row = logits + r * stride;
        const float logit = row[token_ids[r]];
        baton::Best best{top_logprobs + r * k, top_ids + r * k, k};
        baton::RowStats stats = baton::scan(row, n, logit, best);
        float normalizer = baton::log_sum_exp(row, n, stats.greatest);
        chosen[r] = logit - normalizer;
        rank[r] = 1 + stats.above;
        for (int64_t i = 0; i < k; i++) best.values[i] -= normalizer;
    }
}

}
