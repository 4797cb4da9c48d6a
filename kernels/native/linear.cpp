// y = x W^T + bias in bfloat16 with AVX512-BF16 or AMX, from one row (where memory bandwidth is the limit) to thousands
// (where the multipliers are); with the norm before it, and the activation or the sum behind it.
//
// W [N, K] is packed into panels of 32 of its rows, each [K / 2][32][2]: the order in which dot_tile.h and amx_tile.h
// read it, and one stream through memory. The last panel is filled up with zeros. Every element of y is one chain of dot
// products in the order of k, so a row of y is bitwise the same in a batch of any size.
#include <algorithm>

#include "amx_tile.h"
#include "dot_tile.h"
#include "cpu_graph.h"

namespace baton {

constexpr int PANEL = 2 * LANES;  // columns of y that one panel gives
constexpr int TILE_ROWS = 14;     // 14 * 2 sums, 2 columns and 1 row fill the 32 vector registers
constexpr int CHUNK_ROWS = 168;   // rows of x that stay in a core's cache while panels stream by
constexpr int TILED_ROWS = 1024;  // with AMX panels stay, PANELS_BYTES of them, while so many rows stream by
constexpr int64_t PANELS_BYTES = 768 << 10;

#if BATON_HAS_PAIRS

struct Linear {
    const bf16 *x, *panels, *bias;
    bf16* y;
    int64_t rows, columns, depth, x_stride;

    const bf16* panel(int64_t number) const { return panels + number * PANEL * depth; }

    bool tiled() const {
#if BATON_HAS_TILES
        return depth % TILE_DEPTH == 0 && tiles_granted();
#else
        return false;
#endif
    }

    // Rounds the sums of one row and one panel, with the bias.
    void write(int64_t row, int64_t panel, f32x16 low, f32x16 high) const {
        int64_t column = panel * PANEL;
        int width = static_cast<int>(std::min<int64_t>(PANEL, columns - column));
        if (bias != nullptr) {
            bf16 padded[PANEL] = {};
            std::memcpy(padded, bias + column, width * sizeof(bf16));
            low += load(padded), high += load(padded + LANES);
        }
        bf16* out = y + row * columns + column;
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        if (width == PANEL) store_bytes(out, both);
        else std::memcpy(out, &both, width * sizeof(bf16));
    }

    template <int R> void tile(int64_t row, int64_t number, const char* prefetch, int64_t prefetch_stride) const {
        f32x16 acc[R][2] = {};
        accumulate<Pairs, R, 2>(acc, x + row * x_stride, x_stride, panel(number), PANEL * 2, depth / 2, prefetch,
                                prefetch_stride);
        for (int r = 0; r < R; r++) write(row + r, number, acc[r][0], acc[r][1]);
    }

    // Rows [begin, end) of one panel. While they are computed, the next panel is fetched, evenly over the row tiles.
    void panel_rows(int64_t number, int64_t begin, int64_t end) const {
        int64_t tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS, bytes = PANEL * depth * sizeof(bf16);
        int64_t steps = depth / 2, stride = bytes / (steps * tiles);
        const char* next = reinterpret_cast<const char*>(panel(number + 1));
        for (int64_t i = 0; i < tiles; i++) {
            int64_t row = begin + (end - begin) * i / tiles, row_end = begin + (end - begin) * (i + 1) / tiles;
            with_rows<TILE_ROWS>(static_cast<int>(row_end - row), [&](auto count) {
                tile<decltype(count)::value>(row, number, next + i * steps * stride, stride);
            });
        }
    }

    // Rows [begin, end) of the panels [first, last).
    void panels_rows(int64_t first, int64_t last, int64_t begin, int64_t end) const {
#if BATON_HAS_TILES
        if (tiled()) return tiles_rows(first, last, begin, end);
#endif
        for (int64_t number = first; number < last; number++) panel_rows(number, begin, end);
    }

#if BATON_HAS_TILES
    // Blocks of equal size, so that tiles are configured once; the last one may begin within the one before. All blocks
    // go through panels that stay in a core's cache, then through the next ones; the first block fetches them.
    void tiles_rows(int64_t first, int64_t last, int64_t begin, int64_t end) const {
        int64_t blocks = (end - begin + TILES_ROWS - 1) / TILES_ROWS, size = (end - begin + blocks - 1) / blocks;
        int64_t stay = std::max<int64_t>(1, PANELS_BYTES / (PANEL * depth * static_cast<int64_t>(sizeof(bf16))));
        Tiles tiles(static_cast<int>(size));
        alignas(64) float sums[TILES_ROWS][PANEL];
        for (int64_t from = first; from < last; from += stay) {
            for (int64_t i = 0; i < blocks; i++) {
                int64_t row = std::min(begin + i * size, end - size);
                for (int64_t number = from; number < std::min(from + stay, last); number++) {
                    const bf16* next = i == 0 ? panel(number + 1) : nullptr;
                    tiles.multiply({x + row * x_stride, x_stride}, {panel(number), 2 * PANEL}, depth, {sums[0], PANEL},
                                   next);
                    for (int64_t r = 0; r < size; r++) write(row + r, number, load(sums[r]), load(sums[r] + LANES));
                }
            }
        }
    }
#endif

    void run(int threads) const {
        if (rows == 0) return;
        int64_t chunk_rows = tiled() ? TILED_ROWS : CHUNK_ROWS;
        int64_t chunks = (rows + chunk_rows - 1) / chunk_rows, panels_all = (columns + PANEL - 1) / PANEL;
        // Few rows: a thread streams through one long run of panels. Many: tasks small enough that threads end together.
        int64_t wanted = (rows <= TILE_ROWS ? 1 : 16) * threads;
        int64_t groups = std::clamp<int64_t>((wanted + chunks - 1) / chunks, 1, panels_all);
        // Chunks begin at whole tiles.
        auto begin = [&](int64_t chunk) { return chunk == chunks ? rows : rows * chunk / chunks / LANES * LANES; };
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t task = 0; task < chunks * groups; task++) {
            int64_t chunk = task / groups, group = task % groups;
            panels_rows(panels_all * group / groups, panels_all * (group + 1) / groups, begin(chunk), begin(chunk + 1));
        }
    }
};

#endif

static void pack_panel(const uint16_t* weight, int64_t rows, int64_t depth, uint16_t* panel) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int64_t r = 0; r < PANEL; r++)
            for (int64_t i = 0; i < 2; i++) *panel++ = r < rows ? weight[r * depth + k + i] : 0;
}

}  // namespace baton

using namespace baton;

extern "C" {

// Whether to pack at all.
int baton_has_linear() { return BATON_HAS_PAIRS; }

// Packs weight [n, k] (k even) into ceil(n / 32) panels of 32 * k elements.
void baton_pack_linear(const uint16_t* weight, uint16_t* packed, int64_t n, int64_t k, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        int64_t row = panel * PANEL;
        pack_panel(weight + row * k, std::min<int64_t>(PANEL, n - row), k, packed + row * k);
    }
}

// x [m, k] with x_stride elements from row to row, y [m, n] contiguous, bias [n] or null.
void baton_linear(const void* x, int64_t x_stride, const void* packed, const void* bias, void* y, int64_t m, int64_t n,
                  int64_t k, int threads) {
#if BATON_HAS_PAIRS
    Linear{static_cast<const bf16*>(x), static_cast<const bf16*>(packed), static_cast<const bf16*>(bias),
           static_cast<bf16*>(y), m, n, k, x_stride}.run(threads);
#endif
}

}

BATON_RECORDABLE(baton_linear)
