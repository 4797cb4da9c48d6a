"""Suggestions for `baton serve` without a model: names on the Hub of models that fit the device of this machine."""

from __future__ import annotations

from dataclasses import dataclass

GB = 10**9
MOST_NAMED = 3
BYTES_PER_PARAMETER = 2  # bfloat16
SHARE = 0.7  # of a device's memory that weights may take: the rest is for KV blocks and activations


@dataclass(frozen=True)
class KnownModel:
    """A model on the Hub, with the number of parameters according to its model card."""

    name: str
    parameters: float

    @property
    def num_bytes(self) -> float:
        return self.parameters * BYTES_PER_PARAMETER


KNOWN_MODELS = (
    KnownModel("Qwen/Qwen3-0.6B", 0.6e9),
    KnownModel("Qwen/Qwen3-1.7B", 1.7e9),
    KnownModel("Qwen/Qwen3-4B", 4.0e9),
    KnownModel("Qwen/Qwen3-8B", 8.2e9),
    KnownModel("Qwen/Qwen3-14B", 14.8e9),
    KnownModel("Qwen/Qwen3-32B", 32.8e9),
)


@dataclass(frozen=True)
class Device:
    """The device on which `baton serve` would run an engine."""

    name: str
    memory_bytes: int
    is_gpu: bool


def find_device() -> Device:
    """Return the first GPU, or else the CPU with the free memory of the host. Loads torch."""
    import torch

    from baton.engine.startup.memory import available_memory_bytes

    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Device(found.name, found.total_memory, is_gpu=True)
    return Device("CPU", available_memory_bytes(), is_gpu=False)


def fitting(device: Device) -> list[KnownModel]:
    """Return a few models that fit: the largest ones for a GPU, the smallest for a CPU, which is slow."""
    models = [model for model in KNOWN_MODELS if model.num_bytes <= SHARE * device.memory_bytes]
    return models[-MOST_NAMED:] if device.is_gpu else models[:MOST_NAMED]


def no_model(device: Device | None = None) -> str:
    """Return the error message for `baton serve` without a model, with commands that would work on this machine."""
    device = device or find_device()
    message = "no model: give a name of the Hub, a folder, or a --config file that has either"
    memory = f"{device.name} with {device.memory_bytes / GB:.0f} GB{'' if device.is_gpu else ' of free memory'}"
    models = fitting(device)
    if not models:
        return f"{message}. This machine ({memory}) is too small for those that are known here by name"
    width = max(len(model.name) for model in models)
    lines = [f"  baton serve {model.name:{width}}  {model.num_bytes / GB:.1f} GB of weights" for model in models]
    counted = "sizes: the parameters of the model cards, in 16 bits"
    return "\n".join([f"{message}. For this machine ({memory}; {counted}):", *lines])
