// Attention of a few queries over the pages of one KV head: online softmax (arXiv:1805.02867), 64 keys at a time.
//
//     query rows      one for each (query token, query head that shares the KV head); kept for the whole tile
//     key block       64 keys, copied from their pages in the order that dot_tile.h reads:
//                       keys     [dim][64]       (with Pairs: [dim / 2][64][2])
//                       values   [64][value_dim] (with Pairs: [64 / 2][value_dim][2])
//     row state       [value_dim] weighted values, [16] sums of weights, [16] the largest score so far (in every lane)
//
// Key blocks begin at multiples of 64, and a block without visible keys leaves a row's state bitwise unchanged. So a
// row's result depends only on its own sequence, not on the tile, the batch, or the chunk in which it is computed.
#pragma once
#include <algorithm>
#include <limits>

#include "dot_tile.h"

namespace baton {

constexpr int KEYS = 64;       // a key block
constexpr int GRANULE = LANES;  // keys that always lie in one page: block sizes are multiples of it
constexpr int TILE_GROUP = 6;  // rows computed together, with TILE_VECTORS
constexpr float UNSEEN = -std::numeric_limits<float>::infinity();  // score of an invisible key
constexpr float SEEN = std::numeric_limits<float>::lowest();        // least score of a visible key
constexpr float NOTHING_SEEN = -1e30f;                              // top score before the first key

inline int64_t row_state_size(int64_t dim) { return dim + 2 * LANES; }

// One KV head of one sequence in the paged cache.
template <class T> struct Pages {
    const T* head;         // the head's keys in block 0
    const int32_t* table;  // the sequence's blocks
    int64_t block_size, block_stride, token_stride, to_value;

    const T* keys(int64_t token) const {
        return head + static_cast<int64_t>(table[token / block_size]) * block_stride + token % block_size * token_stride;
    }
    const T* values(int64_t token) const { return keys(token) + to_value; }
};

// The keys [begin, end) that a query at `position` sees.
struct Sight {
    int64_t window;  // 0: no limit
    int64_t begin(int64_t position) const { return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1); }
    int64_t end(int64_t position) const { return position + 1; }
};

template <class T> inline void prefetch_granule(const T* p, int64_t dim) {
    const char* bytes = reinterpret_cast<const char*>(p);
    for (int64_t i = 0; i < GRANULE * dim * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

#if defined(__AVX__) && !defined(__AVX512F__)
// to[j * to_stride + i] = from[i * stride + j] for i and j below 8.
template <class T> inline void transpose_block(const T* from, int64_t stride, float* to, int64_t to_stride) {
    __m256 rows[8], pairs[8], fours[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) rows[i] = (__m256)load_register(from + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        store_bytes(to + i * to_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        store_bytes(to + (i + 4) * to_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}
#endif

// words[i] lane j <-> words[j] lane i.
inline void transpose(i32x16 (&words)[LANES]) {
#if defined(__AVX512F__)  // in four rounds of exchanging halves
    const i32x16 low[4] = {{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30},
                           {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29},
                           {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27},
                           {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}};
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
        int distance = 1 << round;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & distance) continue;
            i32x16 a = words[i], b = words[i + distance];
            words[i] = __builtin_shuffle(a, b, low[round]);
            words[i + distance] = __builtin_shuffle(a, b, low[round] + distance);
        }
    }
#else
    int32_t from[LANES][LANES], to[LANES][LANES];
    std::memcpy(from, words, sizeof from);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[j][i] = from[i][j];
    std::memcpy(words, to, sizeof to);
#endif
}

// How the pages' elements become operands of Op.
template <class Op, class T> struct Packer {  // Floats: convert
    static int64_t words(int64_t dim) { return dim; }
    static i32x16 key_words(const T* key, int64_t word, int) {
        return reinterpret_cast<i32x16>(load(key + word));
    }
    static void values(const T* const (&rows)[2], int64_t dim, float* packed) {
        for (int i = 0; i < 2; i++) {
            if (rows[i] != nullptr) convert(rows[i], dim, packed + i * dim);
            else std::fill(packed + i * dim, packed + (i + 1) * dim, 0.0f);
        }
    }
    static void queries(const T* q, int64_t dim, float* packed) { convert(q, dim, packed); }
    static void convert(const T* from, int64_t dim, float* to) {
        for (int64_t d = 0; d < dim; d += REGISTER_LANES) store_bytes(to + d, load_register(from + d));
    }
};

#if BATON_HAS_PAIRS
template <> struct Packer<Pairs, bf16> {  // a word is a pair of dimensions of a key, or of keys in a dimension
    static int64_t words(int64_t dim) { return dim / 2; }
    static i32x16 key_words(const bf16* key, int64_t word, int count) {
        if (count == LANES) return load_bytes<i32x16>(key + 2 * word);
        i32x16 part = {};
        std::memcpy(&part, key + 2 * word, count * sizeof(int32_t));
        return part;
    }
    static void values(const bf16* const (&rows)[2], int64_t dim, bf16* packed) {
        for (int64_t d = 0; d < dim; d += LANES) {
            u16x16 even = rows[0] == nullptr ? u16x16{} : load_bytes<u16x16>(rows[0] + d);
            u16x16 odd = rows[1] == nullptr ? u16x16{} : load_bytes<u16x16>(rows[1] + d);
            const u16x16 low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
            store_bytes(packed + 2 * d, __builtin_shuffle(even, odd, low));
            store_bytes(packed + 2 * d + LANES, __builtin_shuffle(even, odd, low + uint16_t{8}));
        }
    }
    static void queries(const bf16* q, int64_t dim, bf16* packed) { std::memcpy(packed, q, dim * sizeof(bf16)); }
};
#endif

// The tile's operands and states; `Op::T` arrays of a thread's scratch memory.
template <class Op, class T> struct AttentionTile {
    using P = Packer<Op, T>;
    using Operand = typename Op::T;

    static constexpr int NV = KEYS / LANES;

    int64_t dim, value_dim, rows, group, first_position;  // row r is query head r % group at position first_position + r / group
    Sight sight;
    float scale;                       // factor of scores, including log2(e): weights are 2^score
    float cap_scale;                   // scores first become tanh(cap_scale * score); 0: no cap
    Operand *queries, *keys, *values;  // [rows][dim], one key block, one value block
    float* state;                      // [rows][row_state_size]

    int64_t position(int64_t row) const { return first_position + row / group; }
    float* row_state(int64_t row) const { return state + row * row_state_size(value_dim); }

    void clear() const {
        for (int64_t r = 0; r < rows; r++) {
            float* row = row_state(r);
            std::fill(row, row + value_dim + LANES, 0.0f);
            store(row + value_dim + LANES, splat(NOTHING_SEEN));
        }
    }

    // Adds the keys [begin, end) to the states; begin is a multiple of KEYS. `way.attend` adds a block of them.
    template <class Way> void attend(const Pages<T>& pages, int64_t begin, int64_t end, Way& way) const {
        for (int64_t first = begin; first < end; first += KEYS) way.attend(*this, pages, first, end);
    }

    // Returns whether rows [row, row + count) must be masked in the key block at `first`.
    bool sees_part(int64_t row, int64_t count, int64_t first) const {
        return sight.begin(position(row + count - 1)) > first || sight.end(position(row)) < first + KEYS;
    }

    // Keys from `end` on are not read: their pages may not exist. Their scores are masked, their values are zeros.
    void pack_keys(const Pages<T>& pages, int64_t first, int64_t end) const {
        for (int64_t key = first; key < std::min(end, first + KEYS); key += GRANULE) {
            if (key + KEYS < end) prefetch_granule(pages.keys(key + KEYS), pages.token_stride);
            transpose_granule(pages.keys(key), pages.token_stride, keys + (key - first) * Op::WIDTH);
        }
    }

    // Nor are values that no row sees: blocks behind the window may be other requests' by now, and hold NaN.
    void pack_values(const Pages<T>& pages, int64_t first, int64_t end) const {
        int64_t oldest = sight.begin(first_position);
        auto seen = [&](int64_t key) { return key >= oldest && key < end; };
        for (int64_t key = first; key < first + KEYS; key += GRANULE) {
            if (key + KEYS < end) prefetch_granule(pages.values(key + KEYS), pages.token_stride);
            const T* from = key < end ? pages.values(key) : nullptr;
            for (int64_t i = 0; i < GRANULE; i += 2) {
                const T* const pair[2] = {seen(key + i) ? from + i * pages.token_stride : nullptr,
                                          seen(key + i + 1) ? from + (i + 1) * pages.token_stride : nullptr};
                P::values(pair, value_dim, values + (key - first + i) * value_dim);
            }
        }
    }

    // Sixteen rows of `dim`, `stride` apart, to columns of a key block.
    void transpose_granule(const T* from, int64_t stride, Operand* to) const {
#if defined(__AVX__) && !defined(__AVX512F__)
        for (int64_t d = 0; d < dim; d += REGISTER_LANES)
            for (int key = 0; key < GRANULE; key += REGISTER_LANES)
                transpose_block(from + key * stride + d, stride, to + d * KEYS + key, KEYS);
#else
        int64_t all = P::words(dim);
        for (int64_t word = 0; word < all; word += LANES) {
            int count = static_cast<int>(std::min<int64_t>(LANES, all - word));
            i32x16 words[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) words[i] = P::key_words(from + i * stride, word, count);
            transpose(words);
            for (int i = 0; i < count; i++) store_bytes(to + (word + i) * KEYS * Op::WIDTH, words[i]);
        }
#endif
    }

    // R rows against the packed block whose first key is `first`.
    template <int R> void attend_rows(int64_t row, int64_t first) const {
        f32x16 scores[R][NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v += TILE_VECTORS<R>) score<R>(scores, row, v);
        if (is_capped())
            for (int r = 0; r < R; r++) cap(scores[r]);
        if (sees_part(row, R, first)) mask(scores, row, first);
        Operand weights[R][KEYS];
        f32x16 fade[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) fade[r] = weigh(scores[r], row_state(row + r) + value_dim, weights[r]);
        int64_t d = 0;
        for (; d + TILE_VECTORS<R> * LANES <= value_dim; d += TILE_VECTORS<R> * LANES)
            add_values<R, TILE_VECTORS<R>>(row, d, weights, fade);
        for (; d < value_dim; d += LANES) add_values<R, 1>(row, d, weights, fade);
    }

    template <int R> void score(f32x16 (&scores)[R][NV], int64_t row, int v) const {
        f32x16 part[R][TILE_VECTORS<R>] = {};
        accumulate<Op, R, TILE_VECTORS<R>>(part, queries + row * dim, dim, keys + v * LANES * Op::WIDTH, KEYS * Op::WIDTH,
                                        dim / Op::WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int i = 0; i < TILE_VECTORS<R>; i++) scores[r][v + i] = part[r][i];
    }

    bool is_capped() const { return cap_scale != 0.0f; }

    void cap(f32x16 (&scores)[NV]) const {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) scores[v] = tanh(scores[v] * cap_scale);
    }

    template <int R> void mask(f32x16 (&scores)[R][NV], int64_t row, int64_t first) const {
        const f32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int r = 0; r < R; r++) {
            int64_t begin = sight.begin(position(row + r)) - first, end = sight.end(position(row + r)) - first;
            f32x16 from = splat(std::clamp<int64_t>(begin, 0, KEYS)), to = splat(std::clamp<int64_t>(end, 0, KEYS));
            for (int v = 0; v < NV; v++) {
                f32x16 key = lane + static_cast<float>(v * LANES);
                scores[r][v] = choose(at_least(key, from) & greater(to, key), scores[r][v], splat(UNSEEN));
            }
        }
    }

    // Turns a row's scores into weights relative to its largest score. Returns the factor of earlier sums.
    // `sums` are the row's [16] sums of weights and [16] largest score.
    f32x16 weigh(const f32x16 (&scores)[NV], float* sums, Operand* weights) const {
        constexpr int PARTS = KEYS / REGISTER_LANES, EACH = LANES / REGISTER_LANES;
        const Register* parts = reinterpret_cast<const Register*>(scores);
        Register largest = parts[0];
#pragma GCC unroll 16
        for (int v = 1; v < PARTS; v++) largest = max(largest, parts[v]);
        Register before = load_bytes<Register>(sums + LANES);
        largest = max(before, splat_register(greatest(largest)) * scale);
        Register fade = power_of_two(before - largest), totals[EACH];
        for (int i = 0; i < EACH; i++) totals[i] = load_register(sums + i * REGISTER_LANES) * fade;
#pragma GCC unroll 16
        for (int v = 0; v < PARTS; v++) {
            Register weight = power_of_two(parts[v] * scale - largest);
            weight = choose(greater(splat_register(SEEN), parts[v]), Register{}, weight);
            totals[v % EACH] += weight;
            store_register(weights + v * REGISTER_LANES, weight);
        }
        for (int i = 0; i < EACH; i++) {
            store_bytes(sums + i * REGISTER_LANES, totals[i]);
            store_bytes(sums + LANES + i * REGISTER_LANES, largest);
        }
        return splat(fade[0]);
    }

    template <int R, int COLUMNS>
    void add_values(int64_t row, int64_t d, const Operand (&weights)[R][KEYS], const f32x16 (&fade)[R]) const {
        f32x16 acc[R][COLUMNS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < COLUMNS; v++) acc[r][v] = load(row_state(row + r) + d + v * LANES) * fade[r];
        accumulate<Op, R, COLUMNS>(acc, weights[0], KEYS, values + d * Op::WIDTH, value_dim * Op::WIDTH, KEYS / Op::WIDTH);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < COLUMNS; v++) store(row_state(row + r) + d + v * LANES, acc[r][v]);
    }
};

// Computes a tile's rows with a packed key block in vector registers, a few rows at a time.
struct InRegisters {
    template <class Tile> explicit InRegisters(const Tile&) {}

    template <class Tile, class T>
    void attend(const Tile& tile, const Pages<T>& pages, int64_t first, int64_t end) const {
        tile.pack_keys(pages, first, end);
        tile.pack_values(pages, first, end);
        for (int64_t r = 0; r < tile.rows; r += TILE_GROUP) {
            with_rows<TILE_GROUP>(static_cast<int>(std::min<int64_t>(TILE_GROUP, tile.rows - r)), [&](auto count) {
                tile.template attend_rows<decltype(count)::value>(r, first);
            });
        }
    }
};

// Adds the state of a later part of the same row's keys.
inline void merge_rows(float* into, const float* part, int64_t rows, int64_t dim) {
    for (int64_t r = 0; r < rows; r++, into += row_state_size(dim), part += row_state_size(dim)) {
        f32x16 ours = load(into + dim + LANES), theirs = load(part + dim + LANES), largest = max(ours, theirs);
        f32x16 our_share = power_of_two(ours - largest), their_share = power_of_two(theirs - largest);
        for (int64_t d = 0; d < dim + LANES; d += LANES)
            store(into + d, load(into + d) * our_share + load(part + d) * their_share);
        store(into + dim + LANES, largest);
    }
}

}  // namespace baton
