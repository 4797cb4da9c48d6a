"""Gluon primitives for Hopper that attention and MLA share.

rings    ring buffers in shared memory that TMA fills and warp groups empty, and the names that differ between versions
         of Triton
flash    prefill attention over such rings: producers send queries, keys and values, two warp groups consume them

Importing the modules needs Triton; importing this package does not.
"""
