"""Simulations in virtual time: routers and autoscalers on the same requests, with real schedulers and no device."""
