"""The Ray cluster that `--address auto` finds, if several run, or have run, on a machine."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import ray
from ray._private import services

from baton.cluster.cli.ray_cluster import NoRayCluster, ask_directory, connect, find_running, ray_environment
from baton.cluster.membership.members import NoSuchRank

from ...helpers.free_ports import free_port


@contextlib.contextmanager
def clusters_here(monkeypatch: pytest.MonkeyPatch, *, named: str | None, found: list[str]) -> Iterator[None]:
    """Fake the clusters that Ray finds on this machine: the one recorded by `ray start`, and those of processes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda _: named)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset(found))
    yield


@pytest.fixture
def listening() -> Iterator[Callable[[], str]]:
    with contextlib.ExitStack() as open_ports:

        def listen() -> str:
            listener = open_ports.enter_context(socket.create_server(("127.0.0.1", 0)))
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield listen


def dead() -> str:
    return f"127.0.0.1:{free_port()}"


def test_auto_is_never_a_dead_cluster(monkeypatch: pytest.MonkeyPatch, listening: Callable[[], str]) -> None:
    alive = listening()
    for named in (None, dead()):
        with clusters_here(monkeypatch, named=named, found=[dead(), dead(), alive]):
            assert find_running("auto") == alive


def test_auto_is_what_ray_start_has_made_known_while_that_lives(
    monkeypatch: pytest.MonkeyPatch, listening: Callable[[], str]
) -> None:
    other, named = listening(), listening()
    with clusters_here(monkeypatch, named=named, found=[other, named]):
        assert find_running("auto") == named


def test_auto_takes_none_of_several_clusters_and_names_them(
    monkeypatch: pytest.MonkeyPatch, listening: Callable[[], str]
) -> None:
    one, other = sorted([listening(), listening()])
    with (
        clusters_here(monkeypatch, named=dead(), found=[dead(), one, other]),
        pytest.raises(NoRayCluster, match=f"2 Ray clusters run on this machine: {one}, {other}; say which"),
    ):
        find_running("auto")


def test_auto_says_where_no_cluster_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dead()
    with (
        clusters_here(monkeypatch, named=gone, found=[dead()]),
        pytest.raises(NoRayCluster, match=f"no Ray cluster runs on this machine .*{gone}, does not answer"),
    ):
        find_running("auto")


@pytest.mark.parametrize("token", [None, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "file"])
def test_a_cluster_is_joined_with_the_token_that_is_here_and_without_one_where_there_is_none(
    token: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if token == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray/auth_token").write_text("abc")
    elif token is not None:
        monkeypatch.setenv(token, "abc")
    assert ray_environment(joins=True).get("RAY_AUTH_MODE") == (None if token is None else "token")
    assert ray_environment(joins=False)["RAY_AUTH_MODE"] == "token", "a cluster of our own has one"


def test_a_refusal_of_the_directory_is_its_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = NoSuchRank("there is no rank 7 now; there are: 0, 1")
    from_ray = ray.exceptions.RayTaskError("drain_rank", f"Traceback\nNoSuchRank: {refusal}", refusal)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_actor", MagicMock())
    monkeypatch.setattr(ray, "get", MagicMock(side_effect=from_ray.as_instanceof_cause()))
    with pytest.raises(NoSuchRank, match=f"^{re.escape(str(refusal))}$"):
        ask_directory("auto", "baton", "drain_rank", 7)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (PermissionError(13, "Permission denied", "/home/nobody/.ray"), "token in ~/.ray: .* RAY_AUTH_TOKEN$"),
        (PermissionError(13, "Permission denied", "/scratch/ray/session_1"), "logs are in /scratch/ray$"),
        (RuntimeError("The current node timed out during startup"), "logs are in /scratch/ray$"),
    ],
)
def test_a_cluster_that_does_not_start_says_where_to_look(
    error: Exception, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ray_environment(joins=False):
        monkeypatch.setenv(name, "")  # to be as it was afterwards
    monkeypatch.setenv("HOME", "/home/nobody")
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    monkeypatch.setattr("ray._private.utils.set_sigterm_handler", None)
    monkeypatch.setattr(ray, "init", MagicMock(side_effect=error))
    with pytest.raises(NoRayCluster, match=f"does not start on this machine: {re.escape(str(error))}. Ray.*{hint}"):
        connect(None)
