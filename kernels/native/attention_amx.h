// The rows of attention_tile.h with AMX: scores and weighted sums of up to 32 rows at a time, with the softmax between
// them in vector registers. Key blocks are packed as for AVX512-BF16.
//
// A score is one chain over the dimensions. A row's sum over the values of a key block is one chain over its keys, and
// is then added to the state. So a row's result depends only on its own sequence here, too. It differs in the last bits
// from AVX512-BF16, since tiles sum even and odd k separately. So a head size uses the same way for any number of rows.
#pragma once
#include "amx_tile.h"
#include "attention_tile.h"

#if BATON_HAS_TILES

namespace baton {

class InTiles {
  public:
    using Tile = AttentionTile<Pairs, bf16>;

    static bool serve(int64_t dim, int64_t value_dim) {
        return dim % TILE_DEPTH == 0 && value_dim % COLUMNS == 0 && tiles_granted();
    }

    // Steps of equal height, so that tiles are configured once. The last may extend past the tile's rows (never past
    // their memory); results there are ignored.
    explicit InTiles(const Tile& tile) : height(equal_height(tile.rows)), tiles(static_cast<int>(height)) {
        if (few(tile)) tile.transpose_granule(tile.queries, tile.dim, tile.keys);
    }

    void attend(const Tile& tile, const Pages<bf16>& pages, int64_t first, int64_t end) {
        tile.pack_values(pages, first, end);
        if (few(tile)) score_in_place(tile, pages, first, end);
        else tile.pack_keys(pages, first, end);
        for (int64_t row = 0; row < tile.rows; row += height) {
            int64_t count = std::min(height, tile.rows - row);
            if (!few(tile)) score(tile, row);
            weigh(tile, row, count, first);
            add_values(tile, row, count);
        }
    }

  private:
    static constexpr int COLUMNS = 2 * LANES;  // that a product gives

    // For few rows, transposing their scores takes less time than transposing keys: keys are read from their pages, and
    // the queries are packed instead.
    static bool few(const Tile& tile) { return tile.rows <= LANES; }

    static int64_t equal_height(int64_t rows) {
        int64_t steps = (rows + TILES_ROWS - 1) / TILES_ROWS;
        return (rows + steps - 1) / steps;
    }

    void score(const Tile& tile, int64_t row) {
        for (int key = 0; key < KEYS; key += COLUMNS)
            tiles.multiply({tile.queries + row * tile.dim, tile.dim}, {tile.keys + 2 * key, 2 * KEYS}, tile.dim,
                           {scores[0] + key, KEYS});
    }

    void score_in_place(const Tile& tile, const Pages<bf16>& pages, int64_t first, int64_t end) {
        for (int64_t key = first; key < std::min(end, first + KEYS); key += GRANULE) {
            if (key + KEYS < end) prefetch_granule(pages.keys(key + KEYS), pages.token_stride);
            alignas(64) float across[LANES][LANES];
            tiles.multiply_across({pages.keys(key), pages.token_stride}, {tile.keys, 2 * KEYS}, tile.dim, across);
            i32x16 words[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) words[i] = load_bytes<i32x16>(across[i]);
            transpose(words);
            for (int64_t r = 0; r < tile.rows; r++) store_bytes(scores[r] + key - first, words[r]);
        }
    }

    void weigh(const Tile& tile, int64_t row, int64_t count, int64_t first) {
        bool masked = tile.sees_part(row, count, first);
        for (int64_t r = 0; r < count; r++) {
            f32x16 own[1][Tile::NV];
#pragma GCC unroll 4
            for (int v = 0; v < Tile::NV; v++) own[0][v] = load(scores[r] + v * LANES);
            if (tile.is_capped()) tile.cap(own[0]);
            if (masked) tile.mask(own, row + r, first);
            fades[r] = tile.weigh(own[0], tile.row_state(row + r) + tile.value_dim, weights[r])[0];
        }
    }

    void add_values(const Tile& tile, int64_t row, int64_t count) {
        for (int64_t d = 0; d < tile.value_dim; d += COLUMNS) {
            tiles.multiply({weights[0], KEYS}, {tile.values + 2 * d, 2 * tile.value_dim}, KEYS, {sums[0], COLUMNS});
            for (int64_t r = 0; r < count; r++) {
                float* state = tile.row_state(row + r) + d;
                store(state, load(state) * fades[r] + load(sums[r]));
                store(state + LANES, load(state + LANES) * fades[r] + load(sums[r] + LANES));
            }
        }
    }

    const int64_t height;
    const Tiles tiles;
    alignas(64) float scores[TILES_ROWS][KEYS], sums[TILES_ROWS][COLUMNS];
    alignas(64) bf16 weights[TILES_ROWS][KEYS];
    float fades[TILES_ROWS];
};

}  // namespace baton

#endif
