"""The processes around a gateway: its port, its Serve replica, or the controller of gateways beside engines.

The gateway's answers are made in `cluster/gateway`, which does not use Ray.
"""
