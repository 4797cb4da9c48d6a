"""API keys: those of a gateway's settings, and those of a file that may change while it serves; and what each may do.

sk-one                        a line of the file: a key
sk-two min_priority=-10       a key whose requests may ask for a priority of -10 or more
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.engine.core.messages import LOWEST_PRIORITY

from .settings import GatewaySettings, sendable

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks at the file

Version = tuple[int, int, int]


class InvalidKeys(ValueError):
    """A file of API keys gives none that could be used. The message says which file, and never a key."""


@dataclass(frozen=True)
class KeyRights:
    """What the line of a key allows its requests."""

    min_priority: int | None = None  # None: that of the settings


@dataclass(frozen=True)
class Caller:
    """What a gateway knows about the sender of a request."""

    key: bytes | None  # a digest of its API key; None where no key is asked for
    min_priority: int


def keys_in(file: str) -> dict[str, KeyRights]:
    """Return the keys of a file, one a line, and their rights; the last line of a key counts.

    Never empty, for without keys everyone could call. Raises `InvalidKeys`.
    """
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidKeys(f"gateway.api_keys_file: {file}: {error}") from None
    keys = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        key, *rights = line.split()
        try:
            keys[sendable(key)] = _rights(rights)
        except ValueError as error:
            raise InvalidKeys(f"gateway.api_keys_file: {file}: the key in line {number} {error}") from None
    if not keys:
        raise InvalidKeys(f"gateway.api_keys_file: {file} holds no key: one a line is expected")
    return keys


def _rights(words: list[str]) -> KeyRights:
    """Raises `ValueError`, without the words: they may be a part of a key."""
    if not words:
        return KeyRights()
    given = re.fullmatch(r"min_priority=(-?[0-9]{1,10})", words[0])
    if given is None or len(words) > 1:
        raise ValueError("must be printable ASCII without blanks; behind it object_of_type min_priority=N may follow")
    if not LOWEST_PRIORITY <= int(given[1]) <= 0:
        raise ValueError(f"may have a min_priority from {LOWEST_PRIORITY} to 0")
    return KeyRights(int(given[1]))


class ApiKeys:
    """The keys that open, and their rights.

    file ──other keys──> they count from the next request on; what has begun goes on
         ──gone, empty, unreadable──> nothing changes, and the log says so; it is tried again at every look

    So a slip lets nobody in, and shuts nobody out.
    """

    def __init__(self, settings: GatewaySettings, now_s: Callable[[], float] = time.monotonic) -> None:
        """Raises `InvalidKeys` where there is a file and it gives none."""
        self._given, self._file, self._now_s = settings.api_keys, settings.api_keys_file, now_s
        self._min_priority = settings.min_priority
        self._version = _version(self._file)
        self._look_at_s = now_s() + LOOK_S
        self._trouble = ""  # with the file, as the log has said
        self._rights = self._read()  # by digest of the key

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._rights

    @property
    def anonymous(self) -> Caller:
        """A client that sends no key, where none is asked for."""
        return Caller(None, self._min_priority)

    def caller(self, key: bytes) -> Caller | None:
        """The client with this key; None where the key does not open."""
        self._look()
        given = _digest(key)
        # Each comparison takes the same time, and all are made.
        matches = [rights for digest, rights in self._rights.items() if hmac.compare_digest(given, digest)]
        if not matches:
            return None
        own = matches[0].min_priority
        return Caller(given, self._min_priority if own is None else own)

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
            self._rights = self._read()
        except InvalidKeys as error:
            if str(error) != self._trouble:
                logger.warning("%s; the keys of before stay valid", error)
            self._trouble = str(error)  # what ends it, as another mode or a mount, need not change the version
        else:
            logger.info("gateway.api_keys_file: %s has been read: %d keys open now", self._file, len(self._rights))
            self._version, self._trouble = version, ""

    def _read(self) -> dict[bytes, KeyRights]:
        keys = dict.fromkeys(self._given, KeyRights()) | (keys_in(self._file) if self._file else {})
        return {_digest(key.encode()): rights for key, rights in keys.items()}


def cache_salt_of_key(digest: bytes | None) -> str:
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
