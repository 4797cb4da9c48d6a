"""The processes around a gateway: its port, its Serve replica, or the controller of gateways beside ranks.

The answers of a gateway are made in `cluster/gateway`, which knows no Ray.
"""
