// The causal convolution. A task is a block of channels of all sequences, so that its taps are reordered once.
#include <cmath>

#include "cpu_graph.h"
#include "states.h"
#include "vec.h"

namespace baton {

constexpr int64_t BLOCK_CHANNELS = 256;

struct ConvSizes {  // the integers in the order of causal_conv/cpu.py; strides in elements
    int64_t channels, width, silu, x_stride, state_stride, out_stride, drafts_stride;
};

struct ConvStep {
    int dtype;
    const ConvSizes& sizes;
    const void *x, *weight, *bias;  // bias: null for none
    void *state, *out, *drafts;
};

// out = bias + sum of taps times inputs, for n channels, a multiple of 16. taps [width][n]; inputs from the oldest on.
template <int width, bool silu>
__attribute__((noinline)) void convolve(const float* taps, const float* const* inputs, const float* bias, int64_t n,
                                        float* out) {
    const float *first = inputs[0], *second = inputs[1], *third = inputs[width > 2 ? 2 : 1], *last = inputs[width - 1];
    for (int64_t c = 0; c < n; c += LANES) {
        // Each step has its own variable: variables assigned twice go through memory if registers are narrower.
        const f32x16 two = load(taps + c) * load(first + c) + load(taps + n + c) * load(second + c);
        const f32x16 three = width > 2 ? two + load(taps + 2 * n + c) * load(third + c) : two;
        const f32x16 four = width > 3 ? three + load(taps + 3 * n + c) * load(last + c) : three;
        const f32x16 total = four + load(bias + c);
        store(out + c, silu ? times_sigmoid(total, total) : total);
    }
}

using Convolve = void (*)(const float*, const float* const*, const float*, int64_t, float*);

template <bool silu> Convolve convolve_of(int64_t width) {
    return width == 2 ? convolve<2, silu> : width == 3 ? convolve<3, silu> : convolve<4, silu>;
}

class ConvBlock {  // some channels of a sequence, for `carry_state`: the last inputs in a ring of rows
public:
    ConvBlock(const ConvStep& step, int64_t first)
        : step_(step), convolve_((step.sizes.silu ? convolve_of<true> : convolve_of<false>)(step.sizes.width)),
          width_(step.sizes.width), first_(first),
          count_(std::min(BLOCK_CHANNELS, step.sizes.channels - first)), lanes_((count_ + LANES - 1) / LANES * LANES) {
        taps_ = thread_scratch((3 * width_ + 2) * lanes_);
        ring_ = taps_ + width_ * lanes_;
        columns_ = ring_ + width_ * lanes_;
        bias_ = columns_ + width_ * lanes_;
        out_ = bias_ + lanes_;
        std::fill(taps_, out_ + lanes_, 0.0f);
        widen(step.dtype, step.weight, first * width_, count_ * width_, columns_);
        for (int64_t c = 0; c < count_; c++)
            for (int64_t tap = 0; tap < width_; tap++) taps_[tap * lanes_ + c] = columns_[c * width_ + tap];
        if (step.bias != nullptr) widen(step.dtype, step.bias, first, count_, bias_);
    }

    void load(int64_t slot) {
        int64_t tail = width_ - 1;
        newest_ = tail - 1;
        if (slot < 0) {
            std::fill(ring_, ring_ + tail * lanes_, 0.0f);
            return;
        }
        widen(step_.dtype, step_.state, slot * step_.sizes.state_stride + first_ * tail, count_ * tail, columns_);
        for (int64_t i = 0; i < tail; i++)
            for (int64_t c = 0; c < count_; c++) ring_[i * lanes_ + c] = columns_[c * tail + i];
    }

    void store(int64_t slot) {
        int64_t tail = width_ - 1;
        for (int64_t i = 0; i < tail; i++) {
            const float* row = input(tail - 1 - i);
            for (int64_t c = 0; c < count_; c++) columns_[c * tail + i] = row[c];
        }
        narrow(step_.dtype, columns_, count_ * tail, step_.state, slot * step_.sizes.state_stride + first_ * tail);
    }

    void run(int64_t token, int64_t count) {
        for (int64_t end = token + count; token < end; token++) {
            push(step_.x, token * step_.sizes.x_stride);
            const float* inputs[4];
            for (int64_t tap = 0; tap < width_; tap++) inputs[tap] = input(width_ - 1 - tap);
            convolve_(taps_, inputs, bias_, lanes_, out_);
            narrow(step_.dtype, out_, count_, step_.out, token * step_.sizes.out_stride + first_);
        }
    }

    void replay(int64_t place) { push(step_.drafts, place * step_.sizes.drafts_stride); }

    void keep(int64_t token, int64_t place) {
        copy_elements(step_.dtype, step_.x, token * step_.sizes.x_stride + first_, count_, step_.drafts,
                      place * step_.sizes.drafts_stride + first_);
    }

private:
    const ConvStep& step_;
    Convolve convolve_;
    int64_t width_, first_, count_, lanes_, newest_ = 0;  // lanes_: channels, up to a multiple of 16
    float *taps_, *ring_, *columns_, *bias_, *out_;

    const float* input(int64_t back) const { return ring_ + (newest_ - back + width_) % width_ * lanes_; }

    void push(const void* rows, int64_t at) {
        newest_ = (newest_ + 1) % width_;
        widen(step_.dtype, rows, at + first_, count_, ring_ + newest_ * lanes_);
    }
};

void causal_conv(const ConvStep& step, const StateBatch& batch, int64_t num_tokens, int threads) {
    int64_t channels = step.sizes.channels, blocks = (channels + BLOCK_CHANNELS - 1) / BLOCK_CHANNELS;
    clear_padding(batch, num_tokens, step.dtype, step.out, step.sizes.out_stride, channels);
    bool parallel = blocks > 1 && num_tokens * channels >= 32768;  // below that, waking threads takes longer
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (parallel)
    for (int64_t block = 0; block < blocks; block++) {
        ConvBlock state(step, block * BLOCK_CHANNELS);
        for (int64_t seq = 0; seq < batch.num_seqs; seq++) carry_state(batch, seq, num_tokens, state);
    }
}

}  // namespace baton

extern "C" {

// sizes: `ConvSizes`, width 2 to 4. All tensors are of one type. drafts: null for a batch without a replay.
void baton_causal_conv(int dtype, const void* batch, int64_t num_tokens, const int64_t* sizes, const void* x,
                       const void* weight, const void* bias, void* state, void* drafts, void* out, int threads) {
    baton::ConvStep step{dtype, *reinterpret_cast<const baton::ConvSizes*>(sizes), x, weight, bias, state, out, drafts};
    baton::causal_conv(step, *static_cast<const baton::StateBatch*>(batch), num_tokens, threads);
}

}

BATON_RECORDABLE(baton_causal_conv)
