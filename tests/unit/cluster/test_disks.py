"""Names of full disks in errors and warnings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from baton.cluster import disks
from baton.cluster.disks import DiskUsage, default_ray_folder, disk_usage, full_disks
from baton.cluster.engines import group


def test_a_disk_is_full_where_ray_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskUsage(Path("/tmp/ray"), total_bytes=100 * 10**9, free_bytes=4 * 10**9)
    assert disk.is_full
    assert str(disk).startswith("the disk of /tmp/ray is 96.0% full (4.00 of 100.00 GB are free); Ray allows 95%")
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.97")
    assert not disk.is_full


def test_a_folder_that_is_still_to_be_made_is_on_the_disk_of_its_parent(tmp_path: Path) -> None:
    assert disk_usage(tmp_path / "not" / "there").total_bytes == disk_usage(tmp_path).total_bytes > 0


def test_ray_starts_where_its_switches_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert default_ray_folder() == "/scratch/ray"
    monkeypatch.setenv("RAY_TMPDIR", "/mnt")
    assert default_ray_folder() == "/mnt/ray"


def test_the_folder_of_ray_and_the_shared_memory_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disks, "disk_usage", lambda folder: DiskUsage(folder, 100, 1))
    assert [disk.folder for disk in full_disks(str(tmp_path))] == [tmp_path, Path("/dev/shm")]


def test_a_rank_that_died_where_the_disk_is_full_is_told_with_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own words are that it died unexpectedly."""
    monkeypatch.setattr(group, "full_disks", lambda _: [DiskUsage(Path("/tmp/ray"), 100, 1)])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_temp_dir=lambda: "/tmp/ray"))
    told = group.describe_end(ray.exceptions.ActorDiedError())
    assert told.startswith("died: The actor died unexpectedly")
    assert "the disk of /tmp/ray is 99.0% full" in told
    failure = ray.exceptions.RayTaskError("lead", "Traceback ...\nOSError: no such model", OSError("no such model"))
    assert "disk" not in group.describe_end(failure), "it says itself what it failed of"
