"""API keys, from the gateway's settings and from a file that may change while it serves, and the rights of each key.

sk-one                        a line of the file: a key
sk-two min_priority=-10       a key whose requests may have a priority of -10 or more
sk-ops admin                  a key that may drain engines, abort requests and record traces; rights can be combined
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from baton.engine.core.messages import LOWEST_PRIORITY

from .settings import GatewaySettings, check_api_key

logger = logging.getLogger(__name__)

ADMIN = "admin"
LOOK_S = 1.0  # between two checks of the file

Version = tuple[int, int, int]


class InvalidKeys(ValueError):
    """A file of API keys has no usable key. The message names the file, and never a key."""


@dataclass(frozen=True)
class KeyRights:
    """The rights of one API key, as the rest of its line grants them."""

    min_priority: int | None = None  # None: that of the settings applies
    is_admin: bool = False


@dataclass(frozen=True)
class Caller:
    """The authenticated sender of a request."""

    key: bytes | None  # digest of its API key; None if the gateway requires none
    min_priority: int
    is_admin: bool = False


def read_key_file(file: str) -> dict[str, KeyRights]:
    """Read a file with one key and its rights in each line; if a key occurs twice, its last line counts.

    The result is never empty, because a gateway without keys would serve everyone. Raises `InvalidKeys`.
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
            keys[check_api_key(key)] = _rights(rights)
        except ValueError as error:
            raise InvalidKeys(f"gateway.api_keys_file: {file}: the key in line {number} {error}") from None
    if not keys:
        raise InvalidKeys(f"gateway.api_keys_file: {file} holds no key: one a line is expected")
    return keys


def _rights(words: list[str]) -> KeyRights:
    """Parse the words after a key. Raises `ValueError` without quoting the words, which may be a part of a key."""
    priorities = [given[1] for word in words if (given := re.fullmatch(r"min_priority=(-?[0-9]{1,10})", word))]
    num_admin = words.count(ADMIN)
    if len(priorities) + num_admin < len(words) or len(priorities) > 1 or num_admin > 1:
        raise ValueError(f"must be printable ASCII without blanks; behind it min_priority=N and {ADMIN} may follow")
    if priorities and not LOWEST_PRIORITY <= int(priorities[0]) <= 0:
        raise ValueError(f"may have a min_priority from {LOWEST_PRIORITY} to 0")
    return KeyRights(int(priorities[0]) if priorities else None, num_admin == 1)


class ApiKeys:
    """The valid API keys and their rights.

    file ──its keys have changed──> the new keys count from the next request on; running requests continue
         ──is missing, empty, unreadable──> the old keys stay valid, a warning is logged, and each check tries again

    So a mistake in the file neither admits strangers nor locks clients out.
    """

    def __init__(self, settings: GatewaySettings, now_s: Callable[[], float] = time.monotonic) -> None:
        """Read the keys. Raises `InvalidKeys` if a file is configured and has no usable key."""
        self._now_s = now_s
        self.reconfigure(settings)

    def reconfigure(self, settings: GatewaySettings) -> None:
        """Take the keys of other settings, which count from the next request on. Raises like the constructor; then
        nothing has changed.
        """
        version = _version(settings.api_keys_file)
        self._rights = _read(settings.api_keys, settings.api_keys_file)  # by digest of the key
        self._given, self._file, self._version = settings.api_keys, settings.api_keys_file, version
        self._min_priority = settings.min_priority
        self._look_at_s = self._now_s() + LOOK_S
        self._trouble = ""  # the last error of the file, which has been logged

    @property
    def is_open(self) -> bool:
        """True if the gateway requires no key."""
        return not self._rights

    @property
    def anonymous(self) -> Caller:
        """Return the caller for a gateway that requires no key."""
        return Caller(None, self._min_priority)

    def caller(self, key: bytes) -> Caller | None:
        """Return the caller with this key; None if the key is invalid."""
        self._look()
        given = _digest(key)
        # Compare with all keys, each in constant time.
        matches = [rights for digest, rights in self._rights.items() if hmac.compare_digest(given, digest)]
        if not matches:
            return None
        own = matches[0].min_priority
        return Caller(given, self._min_priority if own is None else own, matches[0].is_admin)

    def _look(self) -> None:
        """Read the file again if it has changed: `stat` at most once a second, unless the last read failed."""
        now_s = self._now_s()
        if not self._file or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_S
        version = _version(self._file)
        if version == self._version and not self._trouble:
            return
        try:
            self._rights = _read(self._given, self._file)
        except InvalidKeys as error:
            if str(error) != self._trouble:
                logger.warning("%s; the previous keys stay valid", error)
            self._trouble = str(error)  # its cause, such as file permissions, may vanish without a new version
        else:
            logger.info("gateway.api_keys_file: %s has been read: %d keys are valid now", self._file, len(self._rights))
            self._version, self._trouble = version, ""


def _read(given: Iterable[str], file: str) -> dict[bytes, KeyRights]:
    """Return the rights of all keys, by digest. Raises `InvalidKeys`."""
    keys = dict.fromkeys(given, KeyRights()) | (read_key_file(file) if file else {})
    return {_digest(key.encode()): rights for key, rights in keys.items()}


def cache_salt_of_key(digest: bytes | None) -> str:
    """Return a cache salt that all requests with this key share, at every gateway.

    It is not the key's digest, which engines need not know.
    """
    return "" if digest is None else hashlib.blake2b(digest, digest_size=16, person=b"baton circle").hexdigest()


def _version(file: str) -> Version | None:
    """Return a value that changes when the file is written or replaced (as Kubernetes does); None without a file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
