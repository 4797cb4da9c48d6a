// The logit below which no token of a row may be drawn: top-k, top-p and min-p, without sorting.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "logits.h"

// Draws equal those of sampling/reference.py to the bit, so no product may be fused with a sum.
#pragma GCC optimize("fp-contract=off")

namespace baton {

// The k-th greatest logit; minus infinity if there are fewer.
inline float kth_greatest(const float* logits, int64_t n, int64_t k) {
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

// The greatest logit x for which the weights of all logits >= x reach `goal`. Reorders `tokens`.
inline float weighted_quantile(std::vector<Weighted>& tokens, double goal) {
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
        if (middle != begin && above + greater >= goal) {  // a goal of 0 is reached with the greatest logit
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

// The weights of the logits from `floor` upwards. `weights` is padded to whole vectors.
inline Mass mass_from(const float* logits, const float* weights, int64_t n, float floor) {
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

// The least logit within top-p, among the logits from `floor` upwards: found by bisection, then by selection.
inline float nucleus_floor(const float* logits, int64_t n, float best, float floor, float temperature, float top_p) {
    static thread_local std::vector<float> weights;
    weights.resize((n + LANES - 1) / LANES * LANES);
    const float inverse = 1 / temperature;
    for (int64_t i = 0; i < n; i += LANES)
        store(&weights[i], exponential((load_logits(logits, i, n) - best) * inverse));
    Mass all = mass_from(logits, weights.data(), n, floor), lower = all, upper{0, 0};
    const double goal = top_p * all.weight;
    // All tokens lighter than this together weigh less than 1 - top_p, so the nucleus ends above them.
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

inline float truncation_floor(const float* logits, int64_t n, float best, float temperature, const Truncation& by) {
    float floor = -INFINITE;
    if (by.min_p > 0) floor = round_up(best + (double)temperature * std::log((double)by.min_p));
    if (by.top_k > 0 && by.top_k < n) floor = std::max(floor, kth_greatest(logits, n, by.top_k));
    if (by.top_p < 1) floor = std::max(floor, nucleus_floor(logits, n, best, floor, temperature, by.top_p));
    return floor;
}

}  // namespace baton
