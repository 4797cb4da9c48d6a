"""Settings of the tiers behind an engine's pool: how much memory of the host, and of a disk."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from baton.engine.strict_model import StrictModel

SAVE_S = 5.0


class TierSettings(StrictModel):
    """Sizes for one rank of an engine. Raises `pydantic.ValidationError` for values that cannot work."""

    host_bytes: int = Field(0, ge=0)  # of the host's memory; 0: no such tier
    disk_path: str = ""  # a folder that only engines of this application use; each takes files of its own in it
    disk_bytes: int = Field(0, ge=0)  # of these files; 0: no such tier
    min_tokens: int = Field(256, ge=1)  # a prefix that is shorter is computed rather than restored

    @model_validator(mode="after")
    def _something_is_kept_somewhere(self) -> Self:
        if bool(self.disk_path) != bool(self.disk_bytes):
            missing = "disk_bytes" if self.disk_path else "disk_path"
            raise ValueError(f"a disk tier needs disk_path and disk_bytes: {missing} is missing")
        if not self.host_bytes and not self.disk_bytes:
            raise ValueError("kv_tiers without a tier: give host_bytes, or disk_path and disk_bytes")
        return self

    @property
    def save_s(self) -> float:
        """Seconds that an orderly end may take to save the host's blocks to the disk."""
        return SAVE_S if self.host_bytes and self.disk_bytes else 0.0
