// Mamba-2's recurrence, one token after the other. A task is one head of one sequence, whose state is processed
// in a copy [P][N], a few rows of which are in the L1 cache for a span of tokens.
//
// As in gated_delta.cpp, every token goes through the same instructions, which are not inlined.
#include <cmath>

#include "cpu_graph.h"
#include "states.h"
#include "vec.h"

namespace baton {

constexpr int ROWS_AT_ONCE = 4;        // independent sums, which hide the latency of additions
constexpr int64_t ROWS_IN_CACHE = 16;  // rows of a state that process a span of tokens before the next rows do

struct SSDSizes {  // the integers in the order of ssd/cpu.py; strides in elements
    int64_t heads, groups, head_dim, state_dim;
    int64_t x_stride, b_stride, c_stride, raw_stride, out_stride, state_stride, drafts_stride;
};

struct SSDRows {  // inputs of tokens, or of drafts at their places
    const void *x, *b, *raw;
    int64_t x_stride, b_stride, raw_stride;
};

struct SSDStep {
    int dtype;
    const StateBatch& batch;
    const SSDSizes& sizes;
    SSDRows tokens, drafts;
    const void* c;
    const float *log_rate, *bias, *skip;  // bias and skip: null for none
    float* state;
    void* out;
    float least, most;  // limits of time steps
};

// Lets rows of a state, a multiple of 4, read one token: S = kept S + x (dt b)^T, out = S c. b is times dt already.
__attribute__((noinline)) void read_ssd_token(float* state, int64_t rows, int64_t state_dim, float kept, const float* x,
                                              const float* b, const float* c, float* out) {
    Register decay = everywhere(kept);
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
        Register sums[ROWS_AT_ONCE] = {};
        float* at = state + row * state_dim;
        for (int64_t n = 0; n < state_dim; n += WIDTH) {
            Register written = load_bytes<Register>(b + n), asked = load_bytes<Register>(c + n);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS_AT_ONCE; r++) {
                float* place = at + r * state_dim + n;
                Register now = load_bytes<Register>(place) * decay + x[row + r] * written;
                store_bytes(place, now);
                sums[r] += now * asked;
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS_AT_ONCE; r++) {
            float total = 0.0f;
#pragma GCC unroll 16
            for (int lane = 0; lane < WIDTH; lane++) total += sums[r][lane];
            out[row + r] = total;
        }
    }
}

// Computes n time steps in place, and the decay factor of each; n is a multiple of 16.
__attribute__((noinline)) void time_steps(float* dt, float* kept, int64_t n, float bias, float rate, float least,
                                          float most) {
    for (int64_t i = 0; i < n; i += LANES) {
        const f32x16 step = max(splat(least), softplus(load(dt + i) + bias));
        const f32x16 within = choose(greater(step, splat(most)), splat(most), step);
        store(dt + i, within);
        store(kept + i, exponential(-rate * within));
    }
}

// out += skip x, and b *= dt, for n values, a multiple of 4.
__attribute__((noinline)) void add_times(float* to, const float* x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] += factor * x[i];
}

__attribute__((noinline)) void multiply(float* values, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) values[i] *= factor;
}

class SSDHead {  // one head of a sequence, for `carry_state`
public:
    SSDHead(const SSDStep& step, int64_t head)
        : step_(step), sizes_(step.sizes), head_(head), group_(head * step.sizes.groups / step.sizes.heads) {
        int64_t values = SPAN_TOKENS * sizes_.head_dim, keys = SPAN_TOKENS * sizes_.state_dim;
        current_ = thread_scratch(size() + 2 * values + 2 * keys + 2 * SPAN_TOKENS);
        x_ = current_ + size();
        out_ = x_ + values;
        b_ = out_ + values;
        c_ = b_ + keys;
        dt_ = c_ + keys;
        kept_ = dt_ + SPAN_TOKENS;
    }

    void load(int64_t slot) {
        if (slot < 0) std::fill(current_, current_ + size(), 0.0f);
        else std::memcpy(current_, in_slot(slot), size() * sizeof(float));
    }

    void store(int64_t slot) { std::memcpy(in_slot(slot), current_, size() * sizeof(float)); }

    void run(int64_t token, int64_t count) {
        for (int64_t end = token + count; token < end; token += SPAN_TOKENS) {
            int64_t n = std::min(SPAN_TOKENS, end - token);
            prepare(step_.tokens, token, n, step_.c, sizes_.c_stride);
            read(current_, n);
            write(token, n);
        }
    }

    void replay(int64_t place) {  // its b for c: the same instructions as with one
        prepare(step_.drafts, place, 1, step_.drafts.b, sizes_.drafts_stride);
        read(current_, 1);
    }

    void keep(int64_t token, int64_t place) {
        const SSDRows &from = step_.tokens, &to = step_.drafts;
        int64_t dim = sizes_.head_dim, state_dim = sizes_.state_dim, at = place * sizes_.drafts_stride;
        copy(from.x, token * from.x_stride + head_ * dim, dim, to.x, at + head_ * dim);
        copy(from.raw, token * from.raw_stride + head_, 1, to.raw, at + head_);
        if (head_ % (sizes_.heads / sizes_.groups) == 0)
            copy(from.b, token * from.b_stride + group_ * state_dim, state_dim, to.b, at + group_ * state_dim);
    }

    void run_in_place(int64_t source, int64_t target, int64_t token) {  // a decode: no copy
        float* state = in_slot(target);
        if (source < 0) std::fill(state, state + size(), 0.0f);
        else if (source != target) std::memcpy(state, in_slot(source), size() * sizeof(float));
        prepare(step_.tokens, token, 1, step_.c, sizes_.c_stride);
        read(state, 1);
        write(token, 1);
    }

private:
    const SSDStep& step_;
    const SSDSizes& sizes_;
    int64_t head_, group_;
    float *current_, *x_, *out_, *b_, *c_, *dt_, *kept_;

    int64_t size() const { return sizes_.head_dim * sizes_.state_dim; }

    void copy(const void* from, int64_t first, int64_t n, const void* to, int64_t at) const {
        copy_elements(step_.dtype, from, first, n, const_cast<void*>(to), at);
    }

    float* in_slot(int64_t slot) const { return step_.state + slot * sizes_.state_stride + head_ * size(); }

    // Converts the head's inputs of n tokens to floats.
    void prepare(const SSDRows& rows, int64_t token, int64_t n, const void* c, int64_t c_stride) {
        int64_t dim = sizes_.head_dim, state_dim = sizes_.state_dim, lanes = (n + LANES - 1) / LANES * LANES;
        std::fill(dt_, dt_ + lanes, 0.0f);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = token + i;
            widen(step_.dtype, rows.x, at * rows.x_stride + head_ * dim, dim, x_ + i * dim);
            widen(step_.dtype, rows.b, at * rows.b_stride + group_ * state_dim, state_dim, b_ + i * state_dim);
            widen(step_.dtype, c, at * c_stride + group_ * state_dim, state_dim, c_ + i * state_dim);
            widen(step_.dtype, rows.raw, at * rows.raw_stride + head_, 1, dt_ + i);
        }
        float bias = step_.bias == nullptr ? 0.0f : step_.bias[head_];
        time_steps(dt_, kept_, lanes, bias, std::exp(step_.log_rate[head_]), step_.least, step_.most);
        for (int64_t i = 0; i < n; i++) multiply(b_ + i * state_dim, dt_[i], state_dim);
    }

    void read(float* state, int64_t n) {
        int64_t dim = sizes_.head_dim, state_dim = sizes_.state_dim;
        for (int64_t row = 0; row < dim; row += ROWS_IN_CACHE)
            for (int64_t i = 0; i < n; i++)
                read_ssd_token(state + row * state_dim, std::min(ROWS_IN_CACHE, dim - row), state_dim, kept_[i],
                               x_ + i * dim + row, b_ + i * state_dim, c_ + i * state_dim, out_ + i * dim + row);
    }

    void write(int64_t token, int64_t n) {
        int64_t dim = sizes_.head_dim;
        for (int64_t i = 0; i < n; i++) {
            if (step_.skip != nullptr) add_times(out_ + i * dim, x_ + i * dim, step_.skip[head_], dim);
            narrow(step_.dtype, out_ + i * dim, dim, step_.out, (token + i) * sizes_.out_stride + head_ * dim);
        }
    }
};

void ssd(const SSDStep& step, int64_t num_tokens, int threads) {
    const StateBatch& batch = step.batch;
    int64_t heads = step.sizes.heads, tasks = batch.num_seqs * heads, dim = step.sizes.head_dim;
    clear_padding(batch, num_tokens, step.dtype, step.out, step.sizes.out_stride, heads * dim);
    // Below that, waking threads takes longer.
    bool parallel = tasks > 1 && num_tokens * heads * dim * step.sizes.state_dim >= 1 << 18;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (parallel)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t seq = task / heads;
        SSDHead head(step, task % heads);
        if (batch.goes_in_place(seq, num_tokens))
            head.run_in_place(batch.sources[seq], batch.targets[seq], batch.query_start[seq]);
        else carry_state(batch, seq, num_tokens, head);
    }
}

}  // namespace baton

extern "C" {

// sizes: `SSDSizes`, head_dim a multiple of 4, state_dim one of 16. State, rates, bias and skip are float32, all
// others of type dtype. The places of drafts are null for a batch without a replay.
void baton_ssd(int dtype, const void* batch, int64_t num_tokens, const int64_t* sizes, const void* x, const void* b,
               const void* c, const void* raw, const float* log_rate, const float* bias, const float* skip,
               float* state, void* out, const void* draft_x, const void* draft_b, const void* draft_raw, float least,
               float most, int threads) {
    const auto& given = *reinterpret_cast<const baton::SSDSizes*>(sizes);
    int64_t places = given.drafts_stride;
    baton::SSDStep step{dtype, *static_cast<const baton::StateBatch*>(batch), given,
                        {x, b, raw, given.x_stride, given.b_stride, given.raw_stride},
                        {draft_x, draft_b, draft_raw, places, places, places},
                        c, log_rate, bias, skip, state, out, least, most};
    baton::ssd(step, num_tokens, threads);
}

}

BATON_RECORDABLE(baton_ssd)
