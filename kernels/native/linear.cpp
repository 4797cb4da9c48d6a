// y = x W^T + bias in bfloat16 with AVX512-BF16, from one row (where memory bandwidth is the limit) to thousands (where
// the multipliers are).
//
// W [N, K] is packed into panels of 32 of its rows, each [K / 2][32][2]: the order in which dot_tile.h reads it, and one
// stream through memory. The last panel is filled up with zeros. Every element of y is one chain of dot products in the
// order of k, so a row of y is bitwise the same in a batch of any size.
#include <algorithm>

#include "dot_tile.h"

namespace baton {

constexpr int PANEL = 2 * LANES;  // columns of y that one panel gives
constexpr int TILE_ROWS = 14;     // 14 * 2 sums, 2 columns and 1 row fill the 32 vector registers
constexpr int CHUNK_ROWS = 168;   // rows of x that stay in a core's cache while panels stream by

#if BATON_HAS_PAIRS

struct Linear {
    const bf16 *x, *panels, *bias;
    bf16* y;
    int64_t rows, columns, depth, x_stride;

    template <int R> void tile(int64_t row, int64_t panel, const char* prefetch, int64_t prefetch_stride) const {
        f32x16 acc[R][2] = {};
        accumulate<Pairs, R, 2>(acc, x + row * x_stride, x_stride, panels + panel * PANEL * depth, PANEL * 2, depth / 2,
                                prefetch, prefetch_stride);
        int64_t column = panel * PANEL;
        int width = static_cast<int>(std::min<int64_t>(PANEL, columns - column));
        if (bias != nullptr) {
            bf16 padded[PANEL] = {};
            std::memcpy(padded, bias + column, width * sizeof(bf16));
            f32x16 low = load(padded), high = load(padded + LANES);
            for (int r = 0; r < R; r++) acc[r][0] += low, acc[r][1] += high;
        }
        for (int r = 0; r < R; r++) {
            bf16* out = y + (row + r) * columns + column;
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)acc[r][1], (__m512)acc[r][0]);
            if (width == PANEL) store_bytes(out, both);
            else std::memcpy(out, &both, width * sizeof(bf16));
        }
    }

    // Rows [begin, end) of one panel. While they are computed, the next panel is fetched, evenly over the row tiles.
    void panel_rows(int64_t panel, int64_t begin, int64_t end) const {
        int64_t tiles = (end - begin + TILE_ROWS - 1) / TILE_ROWS, bytes = PANEL * depth * sizeof(bf16);
        int64_t steps = depth / 2, stride = bytes / (steps * tiles);
        const char* next = reinterpret_cast<const char*>(panels + (panel + 1) * PANEL * depth);
        for (int64_t i = 0; i < tiles; i++) {
            int64_t row = begin + (end - begin) * i / tiles, row_end = begin + (end - begin) * (i + 1) / tiles;
            with_rows<TILE_ROWS>(static_cast<int>(row_end - row), [&](auto count) {
                tile<decltype(count)::value>(row, panel, next + i * steps * stride, stride);
            });
        }
    }

    void run(int threads) const {
        if (rows == 0) return;
        int64_t chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, panels_all = (columns + PANEL - 1) / PANEL;
        // Few rows: a thread streams through one long run of panels. Many: tasks small enough that threads end together.
        int64_t wanted = (rows <= TILE_ROWS ? 1 : 16) * threads;
        int64_t groups = std::clamp<int64_t>((wanted + chunks - 1) / chunks, 1, panels_all);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t task = 0; task < chunks * groups; task++) {
            int64_t chunk = task / groups, group = task % groups;
            int64_t begin = rows * chunk / chunks, end = rows * (chunk + 1) / chunks;
            for (int64_t p = panels_all * group / groups; p < panels_all * (group + 1) / groups; p++)
                panel_rows(p, begin, end);
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

// Whether to pack at all. CPUs with AMX leave matrix products to torch, which uses it.
int baton_has_linear() {
#if defined(__AMX_BF16__)
    return 0;
#else
    return BATON_HAS_PAIRS;
#endif
}

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
