"""The kernel library: one folder an op, each with its definition in plain torch and what runs in its place.

`README.md` beside this file is the contract. Importing this package needs neither a GPU nor Triton nor a compiler.
"""
