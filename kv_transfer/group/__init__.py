"""The ranks of one group as one: each reads or copies its own share of blocks, and rank 0 knows when all have."""
