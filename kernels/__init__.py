"""The kernel library: one folder per op, with the op's definition in plain torch and its GPU and CPU implementations.

`README.md` in this folder has the contract. Importing this package needs neither a GPU nor Triton nor a compiler.
"""
