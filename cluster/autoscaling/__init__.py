"""How many groups each fleet has.

What was measured (`load`), what follows from it (`policy`), who carries it out (`scaler`, `serve_policy`), and what it
would have done elsewhere (`simulation`, against other ways to choose `sizes`).
"""
