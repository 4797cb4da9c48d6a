"""Typed access to config.json and similar files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .errors import InvalidModelConfig

# Metadata of a dataclass field. `identity_of` leaves such a field out at its default, so that fields added by a later
# version of Baton do not change the identities of older models.
NEWER: Mapping[str, bool] = MappingProxyType({"newer": True})


class Keys:
    """Typed access to a JSON object; absent and null are the same. Raises `InvalidModelConfig` with the key's name."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def integer(self, name: str, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        """Return a count of at least one."""
        value = self.optional_integer(name, default)
        if value is None:
            raise InvalidModelConfig(f"{self.file} lacks {name!r}")
        if not 1 <= value <= maximum:
            raise InvalidModelConfig(f"{self.file}: {name!r} must be from 1 to {maximum}, not {value}")
        return value

    def count(self, name: str, default: int, maximum: int) -> int:
        """Return a count of zero or more."""
        value = self.optional_integer(name, default)
        if value is None or not 0 <= value <= maximum:
            raise InvalidModelConfig(f"{self.file}: {name!r} must be from 0 to {maximum}, not {value}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        value = self._get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidModelConfig(f"{self.file}: {name!r} must be an integer, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        value = self._get(name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidModelConfig(f"{self.file}: {name!r} must be a number, not {value!r}")
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        value = self.optional_number(name)
        if value is not None and value <= 0:
            raise InvalidModelConfig(f"{self.file}: {name!r} must be more than 0, not {value:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise InvalidModelConfig(f"{self.file}: {name!r} must be true or false, not {value!r}")
        return value

    def layer_flags(self, name: str, num_layers: int) -> tuple[bool, ...]:
        """Return a list of one 0 or 1 for each layer as flags."""
        given = self.values[name]
        if not isinstance(given, list) or len(given) != num_layers or any(flag not in (0, 1) for flag in given):
            raise InvalidModelConfig(
                f"{self.file}: {name!r} must be a list of {num_layers} times 0 or 1, not {given!r}"
            )
        return tuple(flag == 1 for flag in given)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
