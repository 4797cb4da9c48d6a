"""The processes around a gateway: its port, its Serve replica, or the keeper beside its ranks.

What a gateway answers is in `cluster/gateway`, which knows no Ray.
"""
