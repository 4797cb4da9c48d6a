// The sequences of a step, for ops with a recurrent state: `StateBatch` and `Replay` of kernels/state_batch.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vec.h"

namespace baton {

struct StateBatch {  // the words of `StateBatch.words`, in its order
    int64_t num_seqs;
    const int32_t *query_start, *sources, *targets, *num_decodes, *chunk_start, *checkpoints, *seq_chunks;
    const int32_t *rows, *starts, *counts;  // the replay's; null without one
    int64_t num_places;                     // of a row

    // Returns whether a sequence has a single token, and its state only goes from its source to its target.
    bool goes_in_place(int64_t seq, int64_t num_tokens) const {
        int64_t begin = query_start[seq];
        bool one = query_start[seq + 1] - begin == 1 && begin < num_tokens && targets[seq] >= 0;
        bool replays = rows != nullptr && seq < *num_decodes && counts[seq] > 0;
        return one && !replays && seq_chunks[seq] == seq_chunks[seq + 1];
    }

    int64_t place(int64_t seq, int64_t position) const { return rows[seq] * num_places + position % num_places; }
};

// Advances the state of one sequence over its tokens among the step's first num_tokens.
//
//     state.load(slot)            begins with the state in a slot; -1: with zeros
//     state.replay(place)         advances by an earlier step's draft, whose inputs are at a place
//     state.run(token, count)     advances by tokens of this step, and writes their outputs
//     state.store(slot)           writes the state to a slot
//     state.keep(token, place)    stores the inputs of a token at a place
template <class State> void carry_state(const StateBatch& batch, int64_t seq, int64_t num_tokens, State& state) {
    int64_t begin = batch.query_start[seq], end = std::min<int64_t>(batch.query_start[seq + 1], num_tokens);
    if (begin >= end) return;
    int64_t target = batch.targets[seq];
    state.load(batch.sources[seq]);
    if (batch.rows != nullptr && seq < *batch.num_decodes) {
        int64_t start = batch.starts[seq];
        for (int64_t p = start - batch.counts[seq]; p < start; p++) state.replay(batch.place(seq, p));
        state.run(begin, 1);
        if (target >= 0) state.store(target);
        if (end - begin > 1) state.run(begin + 1, end - begin - 1);
        for (int64_t i = 1; i < end - begin; i++) state.keep(begin + i, batch.place(seq, start + i));
        return;
    }
    int64_t first = batch.seq_chunks[seq], last = batch.seq_chunks[seq + 1];
    if (first == last) state.run(begin, end - begin);
    for (int64_t chunk = first; chunk < last; chunk++) {
        state.run(batch.chunk_start[chunk], batch.chunk_start[chunk + 1] - batch.chunk_start[chunk]);
        if (batch.checkpoints[chunk] >= 0) state.store(batch.checkpoints[chunk]);
    }
    if (target >= 0) state.store(target);
}

// ---- products of a state --------------------------------------------------------------------------------------------

constexpr int64_t SPAN_TOKENS = 32;  // tokens that are converted to floats at once

constexpr int WIDTH = REGISTER_LANES;  // compilers keep sums in wider types in memory

inline Register everywhere(float x) { return x - Register{}; }

// ---- rows of any type -----------------------------------------------------------------------------------------------

inline int64_t bytes_of(int dtype) { return static_cast<DType>(dtype) == DType::F32 ? 4 : 2; }

template <class T> void widen_row(const void* from, int64_t first, int64_t n, float* to) {
    const T* row = static_cast<const T*>(from) + first;
    for_lanes(n, [&](int64_t i, int lanes) { store_upto(to + i, load_upto(row + i, lanes), lanes); });
}

template <class T> void narrow_row(const float* from, int64_t n, void* to, int64_t first) {
    T* row = static_cast<T*>(to) + first;
    for_lanes(n, [&](int64_t i, int lanes) { store_upto(row + i, load_upto(from + i, lanes), lanes); });
}

// Converts n elements of type number `dtype`, the first of which is `first`, to floats, and back.
inline void widen(int dtype, const void* from, int64_t first, int64_t n, float* to) {
    BATON_DISPATCH(dtype, widen_row, from, first, n, to)
}

inline void narrow(int dtype, const float* from, int64_t n, void* to, int64_t first) {
    BATON_DISPATCH(dtype, narrow_row, from, n, to, first)
}

inline void copy_elements(int dtype, const void* from, int64_t first, int64_t n, void* to, int64_t at) {
    int64_t size = bytes_of(dtype);
    std::memcpy(static_cast<char*>(to) + at * size, static_cast<const char*>(from) + first * size, n * size);
}

// Clears rows of n elements, `stride` apart, of the tokens that belong to no sequence.
inline void clear_padding(const StateBatch& batch, int64_t num_tokens, int dtype, void* rows, int64_t stride,
                          int64_t n) {
    int64_t size = bytes_of(dtype);
    for (int64_t token = batch.query_start[batch.num_seqs]; token < num_tokens; token++)
        std::memset(static_cast<char*>(rows) + token * stride * size, 0, n * size);
}

}  // namespace baton
