"""The number of groups of each fleet: measurements (`load`), decisions (`policy`), and the scaler in the directory.

Serve gets the decisions through `cluster/serve_policy.py`; `cluster/simulation` runs the scaler in virtual time.
"""
