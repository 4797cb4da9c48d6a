"""Decides the number of groups of each fleet: measurements (`load_samples`), decisions (`policy`), and the `Scaler`,
which runs in the directory.

Serve gets the decisions through `cluster/serve_policy.py`; `cluster/simulation` runs the scaler in virtual time.
"""
