// y = x W^T + bias in bfloat16 and float32, from one row (bound by memory) to thousands of rows (bound by arithmetic).
//
// W [N, K] is packed into panels of 32 of its rows, the order in which dot_tile.h and amx_tile.h read it, and one stream
// through memory. The last panel is padded with zeros.
//
//     bfloat16 with AVX512-BF16 or AMX     [K / 2][32][2]    an element of y is one chain of dot products in the order of k
//     everything else                      [K][32]           chains of DEPTH_BLOCK multiply-adds, summed in their order
//
// So a row of y is bitwise the same in a batch of any size.
#include <algorithm>

#include "amx_tile.h"
#include "dot_tile.h"
#include "cpu_graph.h"

// Without fused multiply-adds, torch's products are used.
#if defined(__AVX512F__) || defined(__FMA__) || defined(__ARM_NEON)
#define BATON_HAS_PRODUCTS 1
#else
#define BATON_HAS_PRODUCTS 0
#endif

namespace baton {

constexpr int PANEL = 2 * LANES;  // columns of y that one panel gives
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 14;  // 14 * 2 sums, 2 columns and 1 row fill the 32 vector registers
#else
constexpr int TILE_ROWS = 6;
#endif

// Tiles of many rows multiply one half of a panel, then the other, where sums of both do not fit into the registers.
constexpr int passes_over_panel(int64_t tile_rows) { return REGISTER_LANES == LANES || tile_rows <= 3 ? 1 : 2; }
constexpr int CHUNK_ROWS = 12 * TILE_ROWS;  // rows of x that stay in a core's cache while panels stream by
constexpr int DEPTH_BLOCK = 256;            // a block of a panel fits in the L1 cache, and few rounding errors add up
constexpr int TILED_ROWS = 1024;  // with AMX, PANELS_BYTES of panels stay in cache while this many rows stream by
constexpr int64_t PANELS_BYTES = 768 << 10;

#if BATON_HAS_PRODUCTS

// What is fetched into the cache meanwhile: `stride` bytes for each step of `accumulate`.
struct Fetch {
    const char* next;
    int64_t stride;
};

template <class Op, class T> struct Linear {  // x, bias and y of T; panels of Op::Column
    using Row = typename Op::T;
    using Column = typename Op::Column;
    static constexpr bool IS_PAIRS = Op::WIDTH == 2;

    const T* x;
    const Column* panels;
    const T* bias;
    T* y;
    int64_t rows, columns, depth, x_stride;

    const Column* panel(int64_t number) const { return panels + number * PANEL * depth; }

    bool tiled() const {
#if BATON_HAS_TILES
        return IS_PAIRS && depth % TILE_DEPTH == 0 && tiles_granted();
#else
        return false;
#endif
    }

    // Rounds the sums of one row and one panel, with the bias.
    void write(int64_t row, int64_t panel, f32x16 low, f32x16 high) const {
        int64_t column = panel * PANEL;
        int width = static_cast<int>(std::min<int64_t>(PANEL, columns - column));
        if (bias != nullptr) {
            T padded[PANEL] = {};
            std::memcpy(padded, bias + column, width * sizeof(T));
            low += load(padded), high += load(padded + LANES);
        }
        T* out = y + row * columns + column;
        if (width == PANEL) return store_both(out, low, high);
        T padded[PANEL];
        store_both(padded, low, high);
        std::memcpy(out, padded, width * sizeof(T));
    }

    static void store_both(T* out, f32x16 low, f32x16 high) {
#if BATON_HAS_PAIRS
        if constexpr (std::is_same_v<T, bf16>)
            return store_bytes(out, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#endif
        store(out, low), store(out + LANES, high);
    }

    // Rows [begin, end) of x as the product reads them.
    struct Operand {
        const Row* first;
        int64_t stride;
    };

    Operand operand(int64_t begin, int64_t end) const {
        const T* from = x + begin * x_stride;
        if constexpr (std::is_same_v<T, Row>) {
            return {from, x_stride};
        } else {
            float* to = thread_scratch((end - begin) * depth);
            for (int64_t r = 0; r < end - begin; r++)
                for_lanes(depth, [&](int64_t k, int lanes) {
                    store_upto(to + r * depth + k, load_upto(from + r * x_stride + k, lanes), lanes);
                });
            return {to, depth};
        }
    }

    // The products of R rows and one panel over the depths [first, last), added to `acc`.
    template <int R>
    void multiply(f32x16 (&acc)[R][2], const Row* a, int64_t stride, const Column* b, int64_t first, int64_t last,
                  Fetch& fetch) const {
        constexpr int COLUMNS = passes_over_panel(R) == 1 ? 2 : 1;
        int64_t steps = (last - first) / Op::WIDTH;
        for (int v = 0; v < 2; v += COLUMNS) {
            f32x16 part[R][COLUMNS] = {};
            accumulate<Op, R, COLUMNS>(part, a + first, stride, b + first * PANEL + v * LANES * Op::WIDTH,
                                       PANEL * Op::WIDTH, steps, fetch.next, fetch.stride);
            fetch.next += steps * fetch.stride;
            for (int r = 0; r < R; r++)
                for (int i = 0; i < COLUMNS; i++) acc[r][v + i] += part[r][i];
        }
    }

    // Rows [begin, end) of one panel. While they are computed, the next panel is fetched, evenly over the row tiles.
    void panel_rows(Operand a, int64_t number, int64_t begin, int64_t end) const {
        alignas(64) float sums[CHUNK_ROWS + LANES][PANEL];  // of a chunk, which is rounded to whole tiles
        int64_t count = end - begin, tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
        int64_t passes = passes_over_panel((count + tiles - 1) / tiles), steps = depth / Op::WIDTH * tiles * passes;
        Fetch fetch{reinterpret_cast<const char*>(panel(number + 1)),
                    static_cast<int64_t>(PANEL * depth * sizeof(Column)) / steps};
        int64_t block = IS_PAIRS ? depth : DEPTH_BLOCK;
        for (int64_t first = 0; first < depth; first += block) {
            int64_t last = std::min(depth, first + block);
            for (int64_t i = 0; i < tiles; i++) {
                int64_t row = count * i / tiles, row_end = count * (i + 1) / tiles;
                with_rows<TILE_ROWS>(static_cast<int>(row_end - row), [&](auto rows) {
                    constexpr int R = decltype(rows)::value;
                    f32x16 acc[R][2] = {};
                    if (first > 0)
                        for (int r = 0; r < R; r++)
                            for (int v = 0; v < 2; v++) acc[r][v] = load(sums[row + r] + v * LANES);
                    multiply<R>(acc, a.first + row * a.stride, a.stride, panel(number), first, last, fetch);
                    for (int r = 0; r < R; r++) {
                        if (last == depth) write(begin + row + r, number, acc[r][0], acc[r][1]);
                        else store(sums[row + r], acc[r][0]), store(sums[row + r] + LANES, acc[r][1]);
                    }
                });
            }
        }
    }

    // Rows [begin, end) of the panels [first, last).
    void panels_rows(int64_t first, int64_t last, int64_t begin, int64_t end) const {
#if BATON_HAS_TILES
        if constexpr (IS_PAIRS)
            if (tiled()) return tiles_rows(first, last, begin, end);
#endif
        Operand a = operand(begin, end);
        for (int64_t number = first; number < last; number++) panel_rows(a, number, begin, end);
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

// `width` consecutive depths are stored next to each other.
template <class T> void pack_panel(const T* weight, int64_t rows, int64_t depth, int width, T* panel) {
    for (int64_t k = 0; k < depth; k += width)
        for (int64_t r = 0; r < PANEL; r++)
            for (int64_t i = 0; i < width; i++) *panel++ = r < rows ? weight[r * depth + k + i] : T{};
}

template <class T> void pack_linear(const void* weight, void* packed, int64_t n, int64_t k, int threads) {
    int width = BATON_HAS_PAIRS && std::is_same_v<T, bf16> ? 2 : 1;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        int64_t row = panel * PANEL;
        pack_panel(static_cast<const T*>(weight) + row * k, std::min<int64_t>(PANEL, n - row), k, width,
                   static_cast<T*>(packed) + row * k);
    }
}

#if BATON_HAS_PRODUCTS

template <class Op, class T>
void multiply_panels(const void* x, int64_t x_stride, const void* packed, const void* bias, void* y, int64_t m,
                     int64_t n, int64_t k, int threads) {
    Linear<Op, T>{static_cast<const T*>(x), static_cast<const typename Op::Column*>(packed),
                  static_cast<const T*>(bias), static_cast<T*>(y), m, n, k, x_stride}.run(threads);
}

#if BATON_HAS_PAIRS
using Bf16Op = Pairs;
#else
using Bf16Op = Widening<bf16>;
#endif

#endif

}  // namespace baton

using namespace baton;

extern "C" {

// Returns whether products with a weight [n, k] of this dtype are supported. For float16, torch's are used.
int baton_has_linear(int dtype, int64_t k) {
    auto type = static_cast<DType>(dtype);
    if (!BATON_HAS_PRODUCTS || k == 0) return false;
    return type == DType::F32 || (type == DType::BF16 && (!BATON_HAS_PAIRS || k % 2 == 0));
}

// Packs weight [n, k] into ceil(n / 32) panels of 32 * k elements.
void baton_pack_linear(int dtype, const void* weight, void* packed, int64_t n, int64_t k, int threads) {
    if (static_cast<DType>(dtype) == DType::F32) pack_linear<float>(weight, packed, n, k, threads);
    else pack_linear<bf16>(weight, packed, n, k, threads);
}

// x [m, k] with x_stride elements from row to row, y [m, n] contiguous, bias [n] or null.
void baton_linear(int dtype, const void* x, int64_t x_stride, const void* packed, const void* bias, void* y, int64_t m,
                  int64_t n, int64_t k, int threads) {
#if BATON_HAS_PRODUCTS
    auto multiply = static_cast<DType>(dtype) == DType::F32 ? multiply_panels<Floats, float> : multiply_panels<Bf16Op, bf16>;
    multiply(x, x_stride, packed, bias, y, m, n, k, threads);
#endif
}

}

BATON_RECORDABLE(baton_linear)
