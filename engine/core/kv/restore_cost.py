"""Decide whether restoring blocks from the tiers is faster than computing them, from measured times of both.

What is not restored is not measured. So a measurement that is older than `FORGOTTEN_S` may be wrong: if it speaks
against a tier, one restore at a time tries that tier again, while other requests compute.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from ..tiers import Restored, Tier

KEPT = 0.8  # weight that earlier measurements keep with each further one
FORGOTTEN_S = 30.0  # a measurement older than this counts as none
MIN_MEASURED_TOKENS = 128  # smaller steps say nothing about the time a prompt takes


class Rate:
    """The time per unit of work. Pieces of work run one after the other, however early they were requested."""

    def __init__(self) -> None:
        self._seconds = self._units = 0.0
        self._over_s = self._measured_s = 0.0

    def note(self, asked_s: float, over_s: float, num_units: float) -> None:
        """Note the end of a piece of work. One without units only bounds the start of the next."""
        began_s, self._over_s = max(asked_s, self._over_s), over_s
        if num_units:
            self.add(over_s - began_s, num_units, over_s)

    def add(self, seconds: float, num_units: float, now_s: float) -> None:
        """Add a measurement made elsewhere: `num_units` took `seconds`."""
        kept = KEPT if self.is_known(now_s) else 0.0
        self._seconds = self._seconds * kept + seconds
        self._units = self._units * kept + num_units
        self._measured_s = now_s

    @property
    def newest_s(self) -> float | None:
        """The seconds per unit, however old; None where nothing was measured."""
        return self._seconds / self._units if self._units else None

    def per_unit_s(self, now_s: float) -> float | None:
        """Return the seconds per unit; None where nothing was measured lately."""
        return self.newest_s if self.is_known(now_s) else None

    def is_known(self, now_s: float) -> bool:
        return self._units > 0 and now_s - self._measured_s <= FORGOTTEN_S


class RestoreCost:
    """Measured times of computing a token and of restoring a block of each tier, by one clock of the caller's.

    Blocks are those of the first group; blocks of others count in proportion to their size.
    """

    def __init__(self) -> None:
        self._planned_s: dict[int, float] = {}  # when each step in flight was planned
        self._computing = Rate()
        self._restoring: dict[Tier, Rate] = {Tier.HOST: Rate(), Tier.DISK: Rate()}
        self._restored_until_s = 0.0

    def planned(self, step: int, now_s: float) -> None:
        self._planned_s[step] = now_s

    def settled(self, step: int, num_tokens: int, now_s: float) -> None:
        num_measured = num_tokens if num_tokens >= MIN_MEASURED_TOKENS else 0
        self._computing.note(self._planned_s.pop(step), now_s, num_measured)

    def restored(self, restored: Restored, since_s: float, now_s: float) -> None:
        """Note a restore. Its time, waiting included, is divided among tiers by the time they spent copying."""
        took_s = now_s - max(since_s, self._restored_until_s)
        self._restored_until_s = now_s
        copies_s = sum(read.seconds for read in restored.reads)
        for read in restored.reads:
            if read.seconds > 0:
                self._restoring[read.tier].add(took_s * read.seconds / copies_s, read.num_blocks, now_s)

    def prefer_restoring(
        self, blocks: Mapping[Tier, float], num_tokens: int, now_s: float, running: Container[Tier] = ()
    ) -> bool:
        """Return whether restoring these blocks is faster than computing `num_tokens`; True while unknown.

        `running` are the tiers that restores are reading.
        """
        token_s = self._computing.newest_s
        if token_s is None:
            return True
        restore_s, is_trial = 0.0, False
        for tier, count in blocks.items():
            rate = self._restoring[tier]
            if (block_s := rate.newest_s) is None:
                return True
            restore_s += count * block_s
            is_old = not (rate.is_known(now_s) and self._computing.is_known(now_s))
            is_trial = is_trial or (is_old and tier not in running)
        return is_trial or restore_s <= num_tokens * token_s

    def token_s(self, now_s: float) -> float | None:
        """Return the time to compute one token; None where nothing was measured lately."""
        return self._computing.per_unit_s(now_s)

    def blocks_s(self, now_s: float) -> dict[Tier, float]:
        """Return the time to restore one block, for each tier that was measured lately."""
        rates = {tier: rate.per_unit_s(now_s) for tier, rate in self._restoring.items()}
        return {tier: block_s for tier, block_s in rates.items() if block_s is not None}
