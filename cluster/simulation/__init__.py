"""Simulations in virtual time: routers and autoscalers on equal requests, with real schedulers and without devices."""
