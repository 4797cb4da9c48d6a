// The gated delta rule, one token after the other. A task is one head of one sequence.
//
//     [K][V] of a slot  ->  tiles [V / 32][K][32], each in the L1 cache for a span of tokens  ->  a slot
//
// Prompts, decodes and drafts go through the same instructions token by token. So a token's bits depend neither on
// how a prompt is cut into chunks, nor on the batch. These functions are not inlined, since the compiler might fuse
// products and sums differently at each call site.
#include <cmath>

#include "cpu_graph.h"
#include "states.h"
#include "vec.h"

namespace baton {

constexpr int64_t TILE = 32;  // values of a row of a tile

struct DeltaSizes {  // the integers in the order of gated_delta/cpu.py; strides in elements
    int64_t heads, key_heads, key_dim, value_dim, per_dim;
    int64_t q_stride, k_stride, v_stride, decay_stride, beta_stride, out_stride, state_stride, drafts_stride;
};

struct DeltaRows {  // inputs of tokens, or of drafts at their places
    const void *k, *v, *decay, *beta;
    int64_t k_stride, v_stride, decay_stride, beta_stride;
};

struct DeltaStep {
    int dtype, gate_dtype;
    const StateBatch& batch;
    const DeltaSizes& sizes;
    const void* q;
    DeltaRows tokens, drafts;
    const float *log_rate, *bias;  // null: decays are logarithms of decay factors, and betas are used as they are
    float* state;
    void* out;
    float scale, norm_eps, beta_scale;  // norm_eps below 0: keys and queries as they are
};

// Lets N registers' worth of value columns of a state read one token: rows of `state` lie `stride` floats apart.
//     S = decay S;  change = beta (v - S^T k);  S += k change^T;  out = S^T q
template <int N, bool PER_DIM>
__attribute__((noinline)) void read_token(float* state, int64_t stride, int64_t key_dim, const float* key,
                                          const float* query, const float* decay, float beta, const float* value,
                                          float* out) {
    constexpr int ROWS = 8 / N;  // independent sums, which hide the latency of additions
    Register sums[ROWS][N] = {}, change[N], result[N] = {};
    for (int64_t i = 0; i < key_dim; i += ROWS) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            Register kept = everywhere(key[i + r] * decay[PER_DIM ? i + r : 0]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[r][n] += load_bytes<Register>(state + (i + r) * stride + n * WIDTH) * kept;
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
        Register predicted = sums[0][n];
#pragma GCC unroll 8
        for (int r = 1; r < ROWS; r++) predicted += sums[r][n];
        change[n] = beta * (load_bytes<Register>(value + n * WIDTH) - predicted);
    }
    for (int64_t i = 0; i < key_dim; i++) {
        Register kept = everywhere(decay[PER_DIM ? i : 0]), written = everywhere(key[i]), asked = everywhere(query[i]);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            float* at = state + i * stride + n * WIDTH;
            Register now = load_bytes<Register>(at) * kept + written * change[n];
            store_bytes(at, now);
            result[n] += now * asked;
        }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store_bytes(out + n * WIDTH, result[n]);
}

// Divides a row by its length, and multiplies it.
__attribute__((noinline)) void normalize(float* row, int64_t n, float eps, float factor) {
    f32x16 squares = {};
    for (int64_t i = 0; i < n; i += LANES) squares += load(row + i) * load(row + i);
    if (eps >= 0.0f) factor /= std::sqrt(sum(squares) + eps);
    for (int64_t i = 0; i < n; i += LANES) store(row + i, load(row + i) * factor);
}

// Computes decay factors e^-(rate softplus(x + bias)) from n outputs of a projection; n is a multiple of 16.
__attribute__((noinline)) void keep_rates(float* x, int64_t n, float rate, const float* bias, int64_t bias_step) {
    for (int64_t i = 0; i < n; i += LANES) {
        f32x16 shift = bias_step ? load(bias + i) : splat(*bias);
        store(x + i, exponential(-rate * softplus(load(x + i) + shift)));
    }
}

__attribute__((noinline)) void exponentials(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) store(x + i, exponential(load(x + i)));
}

__attribute__((noinline)) void sigmoids(float* x, int64_t n, float scale) {
    for (int64_t i = 0; i < n; i += LANES) store(x + i, times_sigmoid(splat(scale), load(x + i)));
}

class DeltaHead {  // one head of a sequence, for `carry_state`
public:
    DeltaHead(const DeltaStep& step, int64_t head)
        : step_(step), sizes_(step.sizes), head_(head), key_head_(head * step.sizes.key_heads / step.sizes.heads),
          gates_(step.sizes.per_dim ? step.sizes.key_dim : 1) {
        int64_t keys = SPAN_TOKENS * sizes_.key_dim, values = SPAN_TOKENS * sizes_.value_dim;
        tiles_ = thread_scratch(sizes_.key_dim * sizes_.value_dim + 3 * keys + 2 * values + 2 * SPAN_TOKENS);
        keys_ = tiles_ + sizes_.key_dim * sizes_.value_dim;
        queries_ = keys_ + keys;
        kept_ = queries_ + keys;
        values_ = kept_ + keys;
        out_ = values_ + values;
        beta_ = out_ + values;
    }

    void load(int64_t slot) {
        int64_t value_dim = sizes_.value_dim;
        if (slot < 0) {
            std::fill(tiles_, tiles_ + sizes_.key_dim * value_dim, 0.0f);
            return;
        }
        const float* from = in_slot(slot);
        for (int64_t i = 0; i < sizes_.key_dim; i++)
            for (int64_t first = 0; first < value_dim; first += TILE) {
                int64_t width = std::min(TILE, value_dim - first);
                std::memcpy(tile(first) + i * width, from + i * value_dim + first, width * sizeof(float));
            }
    }

    void store(int64_t slot) {
        int64_t value_dim = sizes_.value_dim;
        float* to = in_slot(slot);
        for (int64_t i = 0; i < sizes_.key_dim; i++)
            for (int64_t first = 0; first < value_dim; first += TILE) {
                int64_t width = std::min(TILE, value_dim - first);
                std::memcpy(to + i * value_dim + first, tile(first) + i * width, width * sizeof(float));
            }
    }

    void run(int64_t token, int64_t count) {
        for (int64_t end = token + count; token < end; token += SPAN_TOKENS) {
            int64_t n = std::min(SPAN_TOKENS, end - token);
            prepare(step_.tokens, token, n, step_.q, sizes_.q_stride);
            for (int64_t first = 0; first < sizes_.value_dim; first += TILE)
                read(tile(first), std::min(TILE, sizes_.value_dim - first), first, n);
            write(token, n);
        }
    }

    void replay(int64_t place) {  // its key for a query: the same instructions as with one
        prepare(step_.drafts, place, 1, step_.drafts.k, sizes_.drafts_stride);
        for (int64_t first = 0; first < sizes_.value_dim; first += TILE)
            read(tile(first), std::min(TILE, sizes_.value_dim - first), first, 1);
    }

    void keep(int64_t token, int64_t place) {
        const DeltaRows &from = step_.tokens, &to = step_.drafts;
        int64_t group = sizes_.heads / sizes_.key_heads, at = place * sizes_.drafts_stride;
        if (head_ % group == 0)
            copy(step_.dtype, from.k, token * from.k_stride + key_head_ * sizes_.key_dim, sizes_.key_dim, to.k,
                 at + key_head_ * sizes_.key_dim);
        copy(step_.dtype, from.v, token * from.v_stride + head_ * sizes_.value_dim, sizes_.value_dim, to.v,
             at + head_ * sizes_.value_dim);
        copy(step_.gate_dtype, from.decay, token * from.decay_stride + head_ * gates_, gates_, to.decay,
             at + head_ * gates_);
        copy(step_.gate_dtype, from.beta, token * from.beta_stride + head_, 1, to.beta, at + head_);
    }

    // One token in place, without a copy in tiles: a decode without drafts.
    void run_in_place(int64_t source, int64_t target, int64_t token) {
        int64_t size = sizes_.key_dim * sizes_.value_dim;
        float* state = in_slot(target);
        if (source < 0) std::fill(state, state + size, 0.0f);
        else if (source != target) std::memcpy(state, in_slot(source), size * sizeof(float));
        prepare(step_.tokens, token, 1, step_.q, sizes_.q_stride);
        for (int64_t first = 0; first < sizes_.value_dim; first += TILE) {
            int64_t width = std::min(TILE, sizes_.value_dim - first);
            read_one(state + first, sizes_.value_dim, width, first, 0);
        }
        write(token, 1);
    }

private:
    const DeltaStep& step_;
    const DeltaSizes& sizes_;
    int64_t head_, key_head_, gates_;  // gates_: decays of one token
    float *tiles_, *keys_, *queries_, *kept_, *values_, *out_, *beta_;

    static void copy(int dtype, const void* from, int64_t first, int64_t n, const void* to, int64_t at) {
        copy_elements(dtype, from, first, n, const_cast<void*>(to), at);
    }

    float* tile(int64_t first) const { return tiles_ + first * sizes_.key_dim; }

    float* in_slot(int64_t slot) const {
        return step_.state + slot * sizes_.state_stride + head_ * sizes_.key_dim * sizes_.value_dim;
    }

    // Converts the head's inputs of n tokens to floats.
    void prepare(const DeltaRows& rows, int64_t token, int64_t n, const void* q, int64_t q_stride) {
        int64_t dim = sizes_.key_dim, value_dim = sizes_.value_dim, lanes = (n + LANES - 1) / LANES * LANES;
        std::fill(beta_, beta_ + lanes, 0.0f);
        if (!sizes_.per_dim) std::fill(kept_, kept_ + lanes, 0.0f);
        for (int64_t i = 0; i < n; i++) {
            int64_t at = token + i;
            widen(step_.dtype, rows.k, at * rows.k_stride + key_head_ * dim, dim, keys_ + i * dim);
            widen(step_.dtype, q, at * q_stride + key_head_ * dim, dim, queries_ + i * dim);
            normalize(keys_ + i * dim, dim, step_.norm_eps, 1.0f);
            normalize(queries_ + i * dim, dim, step_.norm_eps, step_.scale);
            widen(step_.dtype, rows.v, at * rows.v_stride + head_ * value_dim, value_dim, values_ + i * value_dim);
            widen(step_.gate_dtype, rows.decay, at * rows.decay_stride + head_ * gates_, gates_, kept_ + i * gates_);
            widen(step_.gate_dtype, rows.beta, at * rows.beta_stride + head_, 1, beta_ + i);
        }
        if (step_.log_rate == nullptr) {
            exponentials(kept_, sizes_.per_dim ? n * dim : lanes);
            return;
        }
        float rate = std::exp(step_.log_rate[head_]);
        sigmoids(beta_, lanes, step_.beta_scale);
        if (!sizes_.per_dim) keep_rates(kept_, lanes, rate, step_.bias + head_, 0);
        else
            for (int64_t i = 0; i < n; i++) keep_rates(kept_ + i * dim, dim, rate, step_.bias + head_ * dim, 1);
    }

    void read(float* state, int64_t width, int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; i++) read_one(state, width, width, first, i);
    }

    void read_one(float* state, int64_t stride, int64_t width, int64_t first, int64_t i) {
        constexpr int WHOLE = TILE / WIDTH, HALF = LANES / WIDTH;
        auto run = sizes_.per_dim ? (width == TILE ? read_token<WHOLE, true> : read_token<HALF, true>)
                                  : (width == TILE ? read_token<WHOLE, false> : read_token<HALF, false>);
        int64_t dim = sizes_.key_dim, at = i * sizes_.value_dim + first;
        run(state, stride, dim, keys_ + i * dim, queries_ + i * dim, kept_ + i * gates_, beta_[i], values_ + at,
            out_ + at);
    }

    void write(int64_t token, int64_t n) {
        for (int64_t i = 0; i < n; i++)
            narrow(step_.dtype, out_ + i * sizes_.value_dim, sizes_.value_dim, step_.out,
                   (token + i) * sizes_.out_stride + head_ * sizes_.value_dim);
    }
};

void gated_delta(const DeltaStep& step, int64_t num_tokens, int threads) {
    const StateBatch& batch = step.batch;
    int64_t heads = step.sizes.heads, tasks = batch.num_seqs * heads;
    int64_t work = num_tokens * heads * step.sizes.key_dim * step.sizes.value_dim;
    clear_padding(batch, num_tokens, step.dtype, step.out, step.sizes.out_stride, heads * step.sizes.value_dim);
    bool parallel = tasks > 1 && work >= 1 << 18;  // below that, waking threads takes longer
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (parallel)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t seq = task / heads, begin = batch.query_start[seq];
        DeltaHead head(step, task % heads);
        if (batch.goes_in_place(seq, num_tokens)) head.run_in_place(batch.sources[seq], batch.targets[seq], begin);
        else carry_state(batch, seq, num_tokens, head);
    }
}

}  // namespace baton

extern "C" {

// sizes: `DeltaSizes`, key_dim and value_dim multiples of 16. State, log_rate and bias are float32, decay and beta
// of type gate_dtype, all others of dtype. The places of drafts are null for a batch without a replay.
void baton_gated_delta(int dtype, int gate_dtype, const void* batch, int64_t num_tokens, const int64_t* sizes,
                       const void* q, const void* k, const void* v, const void* decay, const void* beta,
                       const float* log_rate, const float* bias, float* state, void* out, const void* draft_k,
                       const void* draft_v, const void* draft_decay, const void* draft_beta, float scale,
                       float norm_eps, float beta_scale, int threads) {
    const auto& given = *reinterpret_cast<const baton::DeltaSizes*>(sizes);
    int64_t places = given.drafts_stride;
    baton::DeltaStep step{dtype, gate_dtype, *static_cast<const baton::StateBatch*>(batch), given, q,
                          {k, v, decay, beta, given.k_stride, given.v_stride, given.decay_stride, given.beta_stride},
                          {draft_k, draft_v, draft_decay, draft_beta, places, places, places, places},
                          log_rate, bias, state, out, scale, norm_eps, beta_scale};
    baton::gated_delta(step, num_tokens, threads);
}

}

BATON_RECORDABLE(baton_gated_delta)
