"""A kernel whose loop adds products to a tensor, which a branch of it stores. Triton reads its source from here."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_products(a, b, flags, out, count, SIZE: tl.constexpr, STORES: tl.constexpr):
    """Write the sum of a_i b_i b_i over `count` pairs of matrices; with STORES also sums so far, where flags are."""
    cells = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for index in range(count):
        left = tl.load(a + index * SIZE * SIZE + cells)
        right = tl.load(b + index * SIZE * SIZE + cells)
        products = tl.dot(left, right)
        total = tl.dot(products.to(tl.bfloat16), right, total)
        if STORES:  # noqa: SIM102  (the first is known to the compiler)
            if tl.load(flags + index) > 0:
                tl.store(out + index * SIZE * SIZE + cells, total)
    tl.store(out + cells, total)
