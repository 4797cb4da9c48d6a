"""Gluon primitives for Hopper that attention and MLA share.

rings    ring buffers in shared memory between TMA and warp groups, and names that differ between versions of Triton
flash    prefill attention over such rings: a producer loads queries, keys and values for two consumer warp groups

Importing the modules needs Triton; importing this package does not.
"""
