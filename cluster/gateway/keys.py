"""Whom a gateway lets in: the keys of its settings, and those of a file that may change while it serves."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from .settings import GatewaySettings, sendable

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks at the file

Version = tuple[int, int, int]


class InvalidKeys(ValueError):
    """A file of API keys gives none that could be used. The message says which file, and never a key."""


def keys_in(file: str) -> list[str]:
    """One a line. Never empty, for without keys everyone could call. Raises `InvalidKeys`."""
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidKeys(f"gateway.api_keys_file: {file}: {error}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        if key := line.strip():
            try:
                keys.append(sendable(key))
            except ValueError as error:
                raise InvalidKeys(f"gateway.api_keys_file: {file}: the key in line {number} {error}") from None
    if not keys:
        raise InvalidKeys(f"gateway.api_keys_file: {file} holds no key: one a line is expected")
    return keys


class ApiKeys:
    """The keys that open.

    file ──other keys──> they count from the next request on; what has begun goes on
         ──gone, empty, unreadable──> nothing changes, and the log says so; it is tried again at every look

    So a slip lets nobody in, and shuts nobody out.
    """

    def __init__(self, settings: GatewaySettings, now_s: Callable[[], float] = time.monotonic) -> None:
        """Raises `InvalidKeys` where there is a file and it gives none."""
        self._given, self._file, self._now_s = settings.api_keys, settings.api_keys_file, now_s
        self._version = _version(self._file)
        self._look_at_s = now_s() + LOOK_S
        self._trouble = ""  # with the file, as the log has said
        self._digests = self._read()

    @property
    def everyone(self) -> bool:
        """Whether no key is asked for."""
        return not self._digests

    def digest_if_open(self, key: bytes) -> bytes | None:
        """What stands for the key from here on, where it opens."""
        self._look()
        given = _digest(key)
        # Each comparison takes the same time, and all are made.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given if any(matches) else None

    def _look(self) -> None:
        """One `stat` a second at most, while nothing is wrong."""
        now_s = self._now_s()
        if not self._file or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        version = _version(self._file)
        if version == self._version and not self._trouble:
            return
        try:
            self._digests = self._read()
        except InvalidKeys as error:
            if str(error) != self._trouble:
                logger.warning("%s; the keys of before stay valid", error)
            self._trouble = str(error)  # what ends it, as another mode or a mount, need not change the version
        else:
            logger.info("gateway.api_keys_file: %s has been read: %d keys open now", self._file, len(self._digests))
            self._version, self._trouble = version, ""

    def _read(self) -> list[bytes]:
        keys = [*self._given, *(keys_in(self._file) if self._file else [])]
        return [_digest(key.encode()) for key in keys]


def circle_of(digest: bytes | None) -> str:
    """What requests with this key have in common, at every gateway. Not the digest: engines need not know that."""
    return "" if digest is None else hashlib.blake2b(digest, digest_size=16, person=b"baton circle").hexdigest()


def _version(file: str) -> Version | None:
    """Another one whenever the file has been written, or replaced as Kubernetes does; None where there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
