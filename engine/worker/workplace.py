"""Where one member of a group works, and with whom."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from ..config import EngineConfig, InvalidEngineConfig
from ..parallel.groups import ALL_ALONE, ParallelGroups
from ..parallel.member import ALONE_MEMBER, Member


@dataclass(frozen=True)
class Workplace:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    member: Member = ALONE_MEMBER
    groups: ParallelGroups = ALL_ALONE

    def share_cores(self, most: int | None = None) -> None:
        """Members on one machine share all cores of this process: so many threads does an op on the host use, `most`
        of them, unless OMP_NUM_THREADS says so.
        """
        if "OMP_NUM_THREADS" not in os.environ:
            share = max(1, len(os.sched_getaffinity(0)) // self.member.num_local)
            torch.set_num_threads(share if most is None else min(most, share))


def device_for(config: EngineConfig, member: Member) -> torch.device:
    """The device that the arguments name; "auto" is a GPU where there is one. Raises `InvalidEngineConfig`."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidEngineConfig("device", "is 'cuda', but torch finds no CUDA device here: give 'cpu' or 'auto'")
    index = torch.cuda.current_device() if member.device_index is None else member.device_index
    if index >= torch.cuda.device_count():
        raise InvalidEngineConfig("device", f"rank {member.rank} needs GPU {index}, found {torch.cuda.device_count()}")
    return torch.device("cuda", index)
