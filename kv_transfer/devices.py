"""The devices that blocks are on."""

from __future__ import annotations

from .errors import TransportError


def use_device(device: str) -> int | None:
    """Make a GPU the calling thread's current device, as UCX needs it, and return its number. None: a CPU.

    Raises `TransportError` for other kinds of devices.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or not index.isdigit():
        raise TransportError(f"the KV region is on {device!r}; 'cpu' and 'cuda:N' can be registered")
    import torch

    torch.cuda.set_device(int(index))
    torch.cuda.current_stream().synchronize()  # makes the context current in this thread
    return int(index)
