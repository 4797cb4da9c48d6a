"""Counts the programs that have stored a part of a result, so that the last one combines the parts.

    every program   store its part -> is_last_to_arrive
    the last one    load all parts with `cache_modifier=".cg"`, bypassing L1: other multiprocessors wrote them

There is one int32 counter per result: 0 before the launch, and 0 again after it, since the last program resets it.
"""

import triton
import triton.language as tl


@triton.jit
def is_last_to_arrive(counter, num_others):
    """Count this program; return true if all `num_others` other programs arrived before. Gluon kernels use it, too."""
    tl.debug_barrier()  # all threads must have stored before one of them counts
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_others
    if is_last:
        tl.store(counter, 0)  # for the next launch
    return is_last
