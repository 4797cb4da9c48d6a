"""Sockets between processes: addresses, the cluster's CURVE key pair, limits and heartbeats. No torch, no Ray."""
