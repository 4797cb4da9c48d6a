"""Full disks are named in errors and warnings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from baton.cluster import disks
from baton.cluster.disks import DiskUsage, default_ray_folder, disk_usage, full_disks
from baton.cluster.engines import group


def test_a_disk_is_full_above_rays_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskUsage(Path("/tmp/ray"), total_bytes=100 * 10**9, free_bytes=4 * 10**9)
    assert disk.is_full
    assert str(disk).startswith("the disk of /tmp/ray is 96.0% full (4.00 of 100.00 GB are free); Ray allows 95%")
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.97")
    assert not disk.is_full


def test_a_missing_folder_is_on_the_disk_of_its_parent(tmp_path: Path) -> None:
    assert disk_usage(tmp_path / "not" / "there").total_bytes == disk_usage(tmp_path).total_bytes > 0


def test_rays_folder_follows_its_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert default_ray_folder() == "/scratch/ray"
    monkeypatch.setenv("RAY_TMPDIR", "/mnt")
    assert default_ray_folder() == "/mnt/ray"


def test_rays_folder_and_shared_memory_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disks, "disk_usage", lambda folder: DiskUsage(folder, 100, 1))
    assert [disk.folder for disk in full_disks(str(tmp_path))] == [tmp_path, Path("/dev/shm")]


def test_the_error_of_a_dead_rank_names_the_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself only says that the actor died unexpectedly."""
    monkeypatch.setattr(group, "full_disks", lambda _: [DiskUsage(Path("/tmp/ray"), 100, 1)])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_temp_dir=lambda: "/tmp/ray"))
    told = group.describe_end(ray.exceptions.ActorDiedError())
    assert told.startswith("died: The actor died unexpectedly")
    assert "the disk of /tmp/ray is 99.0% full" in told
    failure = ray.exceptions.RayTaskError("lead", "Traceback ...\nOSError: no such model", OSError("no such model"))
    assert "disk" not in group.describe_end(failure), "this error states its own cause"
