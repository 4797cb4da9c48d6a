"""API keys in a file: gateways follow its changes without a restart."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.cluster.contracts import Role
from baton.cluster.gateway import api_keys as api_keys_module
from baton.cluster.gateway.api_keys import LOOK_S, ApiKeys, InvalidKeys
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.spec import GatewaySpec, InvalidSpec

from ...helpers.gateway_service import Clock, Service


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("sk-one\n\n sk-two \n")
    return file


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(file: Path, clock: Clock) -> ApiKeys:
    return ApiKeys(GatewaySettings(api_keys=["sk-config"], api_keys_file=str(file)), clock)


def opening(keys: ApiKeys, *candidates: str) -> list[str]:
    return [key for key in candidates if keys.caller(key.encode()) is not None]


def test_keys_of_the_file_and_of_the_config_are_valid(keys: ApiKeys) -> None:
    candidates = ["sk-one", "sk-two", "sk-config", "sk-three", "", "sk-one\n"]
    assert opening(keys, *candidates) == ["sk-one", "sk-two", "sk-config"]
    assert not keys.is_open


def test_a_changed_file_takes_effect_at_the_next_check(keys: ApiKeys, file: Path, clock: Clock) -> None:
    file.write_text("sk-two\nsk-three\n")
    clock.now_s += LOOK_S / 2
    assert opening(keys, "sk-one", "sk-three") == ["sk-one"]
    clock.now_s += LOOK_S
    assert opening(keys, "sk-one", "sk-two", "sk-three", "sk-config") == ["sk-two", "sk-three", "sk-config"]


def test_a_file_that_kubernetes_replaces_is_read_again(tmp_path: Path, clock: Clock) -> None:
    """Kubernetes mounts a Secret as a link to a folder and replaces the link; times and sizes may stay the same."""
    for version, key in (("one", "sk-1"), ("two", "sk-2")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(key)
        os.utime(tmp_path / version / "keys", (1_000_000_000, 1_000_000_000))
    current = tmp_path / "current"
    current.symlink_to("one")
    keys = ApiKeys(GatewaySettings(api_keys_file=str(current / "keys")), clock)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(current)
    clock.now_s += LOOK_S
    assert opening(keys, "sk-1", "sk-2") == ["sk-2"]


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe", b"sk-three\nno good\n"])
def test_a_broken_file_changes_nothing_and_is_logged_once(
    keys: ApiKeys, file: Path, clock: Clock, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    for _ in range(3):
        clock.now_s += LOOK_S
        assert opening(keys, "sk-one", "sk-two", "sk-three", "") == ["sk-one", "sk-two"]
    (record,) = caplog.records
    assert str(file) in record.getMessage()
    assert "no good" not in record.getMessage()
    file.write_text("sk-three\n")
    clock.now_s += LOOK_S
    assert opening(keys, "sk-one", "sk-three") == ["sk-three"]


def test_a_file_that_could_not_be_read_for_a_while_is_read_once_it_can_be(
    keys: ApiKeys, file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A changed mode, or a restored mount, does not change the file's times."""
    caplog.set_level("INFO", api_keys_module.__name__)

    def refuse(self: Path) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    file.write_text("sk-three\n")
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "read_text", refuse)
        for _ in range(3):
            clock.now_s += LOOK_S
            assert opening(keys, "sk-one", "sk-three") == ["sk-one"]
    clock.now_s += LOOK_S
    assert opening(keys, "sk-one", "sk-three") == ["sk-three"]
    clock.now_s += LOOK_S
    assert opening(keys, "sk-three") == ["sk-three"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_file_that_is_back_unchanged_is_logged_as_readable_again(
    keys: ApiKeys, file: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", api_keys_module.__name__)
    aside = file.with_name("aside")
    for _ in range(2):
        file.rename(aside)
        clock.now_s += LOOK_S
        assert opening(keys, "sk-one") == ["sk-one"]
        aside.rename(file)
        clock.now_s += LOOK_S
        assert opening(keys, "sk-one") == ["sk-one"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2, "every outage must be logged"


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe", b"two words"])
def test_a_gateway_does_not_start_without_a_key_in_the_file(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidKeys, match=r"gateway\.api_keys_file"):
        ApiKeys(GatewaySettings(api_keys_file=str(file)))
    with pytest.raises(InvalidSpec, match=r"gateway\.api_keys_file"):
        GatewaySpec(api_keys_file=str(file)).keys()


async def test_a_gateway_accepts_the_keys_that_are_in_the_file_now(start: Callable[..., Service], file: Path) -> None:
    service = start(Role.UNIFIED, api_keys_file=str(file))

    async def status(key: str) -> int:
        return (await service.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code

    assert [await status(key) for key in ("sk-one", "sk-three")] == [200, 401]
    file.write_text("sk-three\n")
    async with asyncio.timeout(10):
        while await status("sk-three") != 200:
            await asyncio.sleep(0.05)
    assert await status("sk-one") == 401
