// The product of dot_tile.h with AMX: up to 32 rows of A times 32 columns of B, 32 elements of k per instruction.
//
//                           tmm6            tmm7          columns 0..15 and 16..31 of B: [16 pairs of k][16][2]
//     tmm4   first rows     tmm0            tmm1          sums
//     tmm5   the others     tmm2            tmm3
//
// A row of B has pairs of consecutive k, [n][2]. The caller gives its stride.
//
// Every sum is one chain in the order of k, independent of the other rows and of their number.
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

constexpr int TILES_ROWS = 32;  // most rows of A

// Returns whether the system lets this process use the tiles, which must be requested once.
inline bool tiles_granted() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of Linux: arch_prctl(2), XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

template <class T> struct Rows {
    T* first;
    int64_t stride;  // elements from row to row
};

// The calling thread's tiles, while it multiplies blocks of `rows` rows each.
class Tiles {
  public:
    explicit Tiles(int rows) : first(rows <= 16 ? rows : (rows + 1) / 2), rows(rows) {
        struct alignas(64) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        const int more = rows > first ? rows - first : 16;
        const int heights[8] = {first, first, more, more, first, more, 16, 16};
        for (int tile = 0; tile < 8; tile++) {
            config.rows[tile] = static_cast<uint8_t>(heights[tile]);
            config.row_bytes[tile] = 64;
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;

    // sums[r][n] = sum over k of a[r][k] * b[k][n] for 32 columns n. Meanwhile as much memory is fetched, from
    // `prefetch` on, where that is given.
    void multiply(Rows<const bf16> a, Rows<const bf16> b, int64_t depth, Rows<float> sums,
                  const bf16* prefetch = nullptr) const {
        if (rows > first) multiply<true>(a, b, depth, sums, prefetch);
        else multiply<false>(a, b, depth, sums, prefetch);
    }

    // The transposed product of 16 rows and 16 columns, sums[n][r] = sum over k of b[n][k] * a[k][r], for a B that lies
    // in rows and an A in pairs: bitwise what `multiply` gives. Only for blocks of at most 16 rows, where tiles are free.
    void multiply_across(Rows<const bf16> b, Rows<const bf16> a, int64_t depth, float (&sums)[LANES][LANES]) const {
        const int64_t b_bytes = b.stride * sizeof(bf16), a_bytes = a.stride * sizeof(bf16);
        asm volatile("" ::: "memory");
        _tile_zero(2);
        for (int64_t k = 0; k < depth; k += TILE_DEPTH) {
            _tile_loadd(5, a.first + k / 2 * a.stride, a_bytes);
            _tile_loadd(6, b.first + k, b_bytes);
            _tile_dpbf16ps(2, 6, 5);
        }
        _tile_stored(2, sums[0], sizeof sums[0]);
    }

  private:
    template <bool MORE>
    void multiply(Rows<const bf16> a, Rows<const bf16> b, int64_t depth, Rows<float> sums,
                  const bf16* prefetch) const {
        const int64_t a_bytes = a.stride * sizeof(bf16), b_bytes = b.stride * sizeof(bf16);
        const bf16 *upper = a.first, *lower = upper + first * a.stride;
        asm volatile("" ::: "memory");  // the compiler does not know that the instructions below read memory
        _tile_zero(0);
        _tile_zero(1);
        if (MORE) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < depth; k += TILE_DEPTH) {
            const bf16* columns = b.first + k / 2 * b.stride;
            _tile_loadd(4, upper + k, a_bytes);
            _tile_loadd(6, columns, b_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, columns + 2 * LANES, b_bytes);
            _tile_dpbf16ps(1, 4, 7);
            if (MORE) {
                _tile_loadd(5, lower + k, a_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            if (prefetch != nullptr) prefetch = fetch(prefetch);
        }
        const int64_t sums_bytes = sums.stride * sizeof(float);
        _tile_stored(0, sums.first, sums_bytes);
        _tile_stored(1, sums.first + LANES, sums_bytes);
        if (MORE) {
            float* more = sums.first + first * sums.stride;
            _tile_stored(2, more, sums_bytes);
            _tile_stored(3, more + LANES, sums_bytes);
        }
    }

    // As much as two tiles of B. Returns where it ends.
    static const bf16* fetch(const bf16* memory) {
        for (int line = 0; line < TILE_DEPTH; line++, memory += 2 * LANES) __builtin_prefetch(memory, 0, 2);
        return memory;
    }

    const int first, rows;
};

#endif

}  // namespace baton
