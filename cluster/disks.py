"""Finds disks that are too full for Ray, whose processes die without a message when they cannot write."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

RAY_SWITCH = "RAY_local_fs_capacity_threshold"
DEFAULT_SHARE = 0.95  # Ray's default
SHARED_MEMORY = Path("/dev/shm")
GB = 10**9


@dataclass(frozen=True)
class DiskUsage:
    """The space on the disk of a folder."""

    folder: Path
    total_bytes: int
    free_bytes: int

    @property
    def used(self) -> float:
        return 1 - self.free_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def is_full(self) -> bool:
        """Return whether the disk is fuller than Ray allows: Ray's processes may die when they write."""
        return self.used > _allowed_share()

    def __str__(self) -> str:
        return (
            f"the disk of {self.folder} is {self.used:.1%} full ({self.free_bytes / GB:.2f} of "
            f"{self.total_bytes / GB:.2f} GB are free); Ray allows {_allowed_share():.0%}, and its processes die where "
            "they cannot write: make room there"
        )


def disk_usage(folder: Path) -> DiskUsage:
    """Return the usage of the disk that holds a folder, or would hold it if it does not exist yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    total_bytes, _, free_bytes = shutil.disk_usage(there)
    return DiskUsage(folder, total_bytes, free_bytes)


def default_ray_folder() -> str:
    """Return the folder of a Ray cluster that starts here. Does not import Ray, which would read its switches."""
    return os.path.join(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")


def full_disks(ray_folder: str | None = None) -> list[DiskUsage]:
    """Return the disks of this machine that are too full for Ray. `ray_folder` is that of a running cluster."""
    folders = (Path(ray_folder or default_ray_folder()), SHARED_MEMORY)
    return [disk for disk in map(disk_usage, folders) if disk.is_full]


def _allowed_share() -> float:
    return float(os.environ.get(RAY_SWITCH, DEFAULT_SHARE))
