// Paged attention: divides the tiles of attention_tile.h over threads.
//
// A task is (tile of query tokens of one sequence, KV head). Keys are taken in parts of SPLIT; each part is summed
// separately, and the parts are merged in order. So a decode over a long context can be divided over threads, one task
// per part, and gives bitwise the same result as one thread.
#include <cmath>
#include <memory>
#include <vector>

#include "attention_amx.h"
#include "attention_tile.h"
#include "cpu_graph.h"

namespace baton {

constexpr int64_t SPLIT = 512;      // keys of a part, a multiple of KEYS
constexpr int64_t MAX_ROWS = 128;   // rows of a tile: enough to make packing a key block cheap
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int64_t SMALL_ROWS = 32;  // tiles of at most this many rows may be divided by parts

struct AttentionBatch {
    int64_t num_seqs, q_heads, kv_heads, dim, value_dim, block_size, q_stride, out_stride, table_stride;
    int64_t block_stride, head_stride, token_stride, to_value, window, num_tokens;
    const int32_t *query_start, *seq_lens, *tables, *table_rows;
    const float* sinks;  // one for each query head, or null
    float scale, soft_cap;  // see `AttentionRule`; no cap where that is 0

    int64_t group() const { return q_heads / kv_heads; }
    float score_unit() const { return (soft_cap == 0.0f ? scale : soft_cap) * LOG2_E; }
    float cap_scale() const { return soft_cap == 0.0f ? 0.0f : scale / soft_cap; }
    const int32_t* table(int64_t seq) const { return tables + (table_rows ? table_rows[seq] : seq) * table_stride; }
};

struct AttentionTask {
    int64_t seq, head, token, tokens;  // `token` counts from the step's first
    int64_t position;                  // position of that token in its sequence
    int64_t key_begin, key_end;        // begins at a multiple of SPLIT, or is where the window begins
    int64_t part;                      // where to leave the state; -1: write the result
};

struct SharedTile {  // a tile whose parts are tasks of their own
    AttentionTask whole;
    int64_t first_part, parts;
};

struct AttentionPlan {
    std::vector<AttentionTask> tasks;
    std::vector<SharedTile> shared;
    int64_t parts = 0;

    AttentionPlan(const AttentionBatch& batch, int threads) {
        int64_t tile_tokens = std::max<int64_t>(1, MAX_ROWS / batch.group());
        for (int64_t seq = 0; seq < batch.num_seqs; seq++) {
            int64_t start = batch.query_start[seq], count = batch.query_start[seq + 1] - start;
            if (batch.seq_lens[seq] == 0) continue;  // padding
            int64_t first_position = batch.seq_lens[seq] - count;
            int64_t tiles = (count + tile_tokens - 1) / tile_tokens;
            for (int64_t tile = tiles; tile-- > 0;) {  // the last sees the most keys: it goes first
                int64_t begin = tile * tile_tokens, tokens = std::min(tile_tokens, count - begin);
                for (int64_t head = 0; head < batch.kv_heads; head++)
                    add({seq, head, start + begin, tokens, first_position + begin, 0, 0, -1}, batch, threads);
            }
        }
    }

    void add(AttentionTask task, const AttentionBatch& batch, int threads) {
        Sight sight{batch.window};
        task.key_begin = sight.begin(task.position) / KEYS * KEYS;
        task.key_end = sight.end(task.position + task.tokens - 1);
        int64_t count = (task.key_end - 1) / SPLIT - task.key_begin / SPLIT + 1;
        bool small = task.tokens * batch.group() <= SMALL_ROWS;
        bool few = batch.num_seqs * batch.kv_heads < 4 * threads;
        if (count == 1 || !small || !few) {
            tasks.push_back(task);
            return;
        }
        shared.push_back({task, parts, count});
        for (int64_t i = 0; i < count; i++) {
            AttentionTask part = task;
            int64_t split = task.key_begin / SPLIT + i;
            part.key_begin = std::max(task.key_begin, split * SPLIT);
            part.key_end = std::min(task.key_end, (split + 1) * SPLIT);
            part.part = parts++;
            tasks.push_back(part);
        }
    }
};

template <class Op, class T, class Way> struct AttentionRun {  // Way: InRegisters or InTiles
    const AttentionBatch& batch;
    const T *q, *kv;
    T* out;

    int64_t state_size() const { return MAX_ROWS * row_state_size(batch.value_dim); }
    int64_t part_size() const { return SMALL_ROWS * row_state_size(batch.value_dim); }

    void run(int threads) const {
        clear_padding();
        AttentionPlan plan(batch, threads);
        std::unique_ptr<float[]> parts(new float[plan.parts * part_size()]);
        int64_t count = static_cast<int64_t>(plan.tasks.size());
#pragma omp parallel num_threads(threads) if (count > 1)
        {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count; i++) run_task(plan.tasks[i], parts.get());
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < plan.shared.size(); i++) finish_shared(plan.shared[i], parts.get());
        }
    }

    void clear_padding() const {
        for (int64_t seq = 0; seq < batch.num_seqs; seq++)
            if (batch.seq_lens[seq] == 0) clear_tokens(batch.query_start[seq], batch.query_start[seq + 1]);
        clear_tokens(batch.query_start[batch.num_seqs], batch.num_tokens);
    }

    void clear_tokens(int64_t begin, int64_t end) const {
        std::fill(out + begin * batch.out_stride, out + end * batch.out_stride, T{});
    }

    void run_task(const AttentionTask& task, float* parts) const {
        int64_t dim = batch.dim, value_dim = batch.value_dim, group = batch.group(), rows = task.tokens * group;
        int64_t operand = sizeof(typename Op::T), block = KEYS * std::max(dim, value_dim) * operand / sizeof(float);
        float* scratch = thread_scratch(2 * state_size() + 2 * block + MAX_ROWS * dim);
        float *total = scratch, *part = total + state_size(), *blocks = part + state_size();
        AttentionTile<Op, T> tile{dim, value_dim, rows, group, task.position, Sight{batch.window},
                                  batch.score_unit(), batch.cap_scale(),
                                  reinterpret_cast<typename Op::T*>(blocks + 2 * block),
                                  reinterpret_cast<typename Op::T*>(blocks),
                                  reinterpret_cast<typename Op::T*>(blocks + block), total};
        for (int64_t r = 0; r < rows; r++) {
            const T* from = q + (task.token + r / group) * batch.q_stride + (task.head * group + r % group) * dim;
            Packer<Op, T>::queries(from, dim, tile.queries + r * dim);
        }
        Pages<T> pages{kv + task.head * batch.head_stride, batch.table(task.seq),
                       batch.block_size, batch.block_stride, batch.token_stride, batch.to_value};
        Way way(tile);
        for (int64_t begin = task.key_begin; begin < task.key_end;) {
            int64_t end = std::min(task.key_end, (begin / SPLIT + 1) * SPLIT);
            tile.state = begin == task.key_begin ? total : part;
            tile.clear();
            tile.attend(pages, begin, end, way);
            if (tile.state == part) merge_rows(total, part, rows, value_dim);
            begin = end;
        }
        if (task.part >= 0) std::copy(total, total + rows * row_state_size(value_dim), parts + task.part * part_size());
        else write(task, total);
    }

    void finish_shared(const SharedTile& shared, float* parts) const {
        float* total = parts + shared.first_part * part_size();
        int64_t rows = shared.whole.tokens * batch.group();
        for (int64_t i = 1; i < shared.parts; i++) merge_rows(total, total + i * part_size(), rows, batch.value_dim);
        write(shared.whole, total);
    }

    void write(const AttentionTask& task, const float* state) const {
        int64_t dim = batch.value_dim, group = batch.group();
        for (int64_t r = 0; r < task.tokens * group; r++, state += row_state_size(dim)) {
            T* to = out + (task.token + r / group) * batch.out_stride + (task.head * group + r % group) * dim;
            float total = sum(load(state + dim)), largest = state[dim + LANES];
            if (batch.sinks) total += std::exp2(batch.sinks[task.head * group + r % group] * LOG2_E - largest);
            float share = 1.0f / total;
            for (int64_t d = 0; d < dim; d += LANES) store(to + d, load(state + d) * share);
        }
    }
};

template <class T> struct AttentionOp { using Type = Floats; };
#if BATON_HAS_PAIRS
template <> struct AttentionOp<bf16> { using Type = Pairs; };
#endif

template <class T, class Way>
void attend(const AttentionBatch& batch, const void* q, const void* kv, void* out, int threads) {
    AttentionRun<typename AttentionOp<T>::Type, T, Way>{batch, static_cast<const T*>(q), static_cast<const T*>(kv),
                                                       static_cast<T*>(out)}.run(threads);
}

// The way depends only on the head size: a token's bits must not depend on other rows.
template <class T>
void paged_attention(const AttentionBatch& batch, const void* q, const void* kv, void* out, int threads) {
#if BATON_HAS_TILES
    if constexpr (std::is_same_v<T, bf16>)
        if (InTiles::serve(batch.dim, batch.value_dim)) return attend<T, InTiles>(batch, q, kv, out, threads);
#endif
    attend<T, InRegisters>(batch, q, kv, out, threads);
}

}  // namespace baton

extern "C" {

// sizes: the integers of AttentionBatch in its order; dim, value_dim and block_size are multiples of 16, query heads a multiple of
// KV heads and at most 128 times as many. kv_layer points at the layer in block 0 and head 0. Sequence i's blocks are
// row table_rows[i] of the tables, row i where that is null. sinks: a score without a key for each query head, or null.
// soft_cap: 0 for none.
void baton_paged_attention(int dtype, const void* q, const void* kv_layer, void* out, const int64_t* sizes,
                           const int32_t* query_start, const int32_t* seq_lens, const int32_t* tables,
                           const int32_t* table_rows, const float* sinks, float scale, float soft_cap,
                           int threads) {
    baton::AttentionBatch batch{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],  sizes[5],    sizes[6], sizes[7],
                                sizes[8], sizes[9], sizes[10], sizes[11], sizes[12], sizes[13], sizes[14],
                                query_start, seq_lens, tables, table_rows, sinks, scale, soft_cap};
    BATON_DISPATCH(dtype, baton::paged_attention, batch, q, kv_layer, out, threads)
}

}

BATON_RECORDABLE(baton_paged_attention)
