// The product of dot_tile.h with AMX: up to 32 rows of A times 32 columns of B, 32 elements of k an instruction.
//
//                           tmm6            tmm7          columns 0..15 and 16..31 of B: [16 pairs of k][16][2]
//     tmm4   first rows     tmm0            tmm1          sums
//     tmm5   the others     tmm2            tmm3
//
// Every sum is one chain in the order of k, whatever the other rows are and however many.
#pragma once
#include "vec.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define BATON_HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define BATON_HAS_TILES 0
#endif

namespace baton {

constexpr int64_t TILE_DEPTH = 32;  // elements of k in a tile: depths are multiples of it

#if BATON_HAS_TILES

constexpr int TILES_ROWS = 32;  // rows of A at most

// Whether the system lets this process use the tiles: they have to be asked for, once.
inline bool tiles_granted() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux: arch_prctl(2), XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// The calling thread's tiles, while it multiplies blocks of `rows` rows each.
class Tiles {
  public:
    explicit Tiles(int rows) : first(rows <= 16 ? rows : (rows + 1) / 2), rows(rows) {
        struct alignas(64) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        const int heights[8] = {first, first, rows - first, rows - first, first, rows - first, 16, 16};
        for (int tile = 0; tile < 8; tile++) {
            config.rows[tile] = static_cast<uint8_t>(heights[tile]);
            config.row_bytes[tile] = heights[tile] == 0 ? 0 : 64;
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;

    // sums[r][n] = sum over k of a[r][k] * b[k][n]; b is [depth / 2][32][2]. Meanwhile as much memory is fetched
    // from `prefetch` on, where that is given.
    void multiply(const bf16* a, int64_t a_stride, const bf16* b, int64_t depth, const bf16* prefetch,
                  float (&sums)[TILES_ROWS][2 * LANES]) const {
        if (rows > first) multiply<true>(a, a_stride, b, depth, prefetch, sums);
        else multiply<false>(a, a_stride, b, depth, prefetch, sums);
    }

  private:
    template <bool MORE>
    void multiply(const bf16* a, int64_t a_stride, const bf16* b, int64_t depth, const bf16* prefetch,
                  float (&sums)[TILES_ROWS][2 * LANES]) const {
        constexpr int64_t B_ROW = 2 * LANES * 2, B_BYTES = B_ROW * sizeof(bf16);  // of both tiles
        const int64_t a_bytes = a_stride * sizeof(bf16);
        asm volatile("" ::: "memory");  // the instructions below do not say what they read
        _tile_zero(0);
        _tile_zero(1);
        if (MORE) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < depth; k += TILE_DEPTH, b += TILE_DEPTH / 2 * B_ROW) {
            _tile_loadd(4, a + k, a_bytes);
            _tile_loadd(6, b, B_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + B_ROW / 2, B_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            if (MORE) {
                _tile_loadd(5, a + first * a_stride + k, a_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            if (prefetch == nullptr) continue;
            for (int line = 0; line < TILE_DEPTH / 2; line++, prefetch += B_ROW) {
                __builtin_prefetch(prefetch, 0, 2);
                __builtin_prefetch(prefetch + B_ROW / 2, 0, 2);
            }
        }
        _tile_stored(0, sums[0], sizeof sums[0]);
        _tile_stored(1, sums[0] + LANES, sizeof sums[0]);
        if (MORE) {
            _tile_stored(2, sums[first], sizeof sums[0]);
            _tile_stored(3, sums[first] + LANES, sizeof sums[0]);
        }
    }

    const int first, rows;
};

#endif

}  // namespace baton
