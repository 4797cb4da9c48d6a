"""An account of time, which bounds what drafts may cost in vain, however wrong all other estimates are.

    each step      + `ALLOWANCE` of its time
    with drafts    - its time beyond that of steps without drafts for as many tokens

It starts with the time of `LOAN_STEPS` steps, which is also its maximum. While it is negative there are no drafts. So
speculation makes n steps longer by no more than `ALLOWANCE` + (`LOAN_STEPS` + steps in flight) / n, as long as the time
without drafts is known: all else is compared with it.

Drafts may go on while the account is negative if they are to pay for something that was charged before them, as for
what a draft model has read late: but for no more than `_GRACE` steps that do not pay any of it back.
"""

from __future__ import annotations

ALLOWANCE = 0.015  # share of the time that drafts may cost in vain
LOAN_STEPS = 3.0
_GRACE = 8  # steps that may pay for what was charged before them, and do not
_GUESSED_AFTER = 2  # steps between late reading and the first drafts, in which guesses are made


class Account:
    """The time that drafts may still cost, in seconds."""

    def __init__(self) -> None:
        self._balance_s: float | None = None  # None: no step has been measured
        self._grace_ends = 0  # the last step whose drafts it does not forbid

    @property
    def is_open(self) -> bool:
        """True once the time of a step without drafts is known."""
        return self._balance_s is not None

    @property
    def is_overdrawn(self) -> bool:
        return self._balance_s is not None and self._balance_s < 0

    def covers(self, seconds: float) -> bool:
        return self._balance_s is not None and self._balance_s >= seconds

    def has_grace(self, step: int) -> bool:
        return step <= self._grace_ends

    def begin_grace(self, step: int) -> None:
        """Let the drafts that follow this step pay for what it costs."""
        self._grace_ends = step + _GUESSED_AFTER + _GRACE - 1

    def note(self, seconds: float, plain_s: float, lost_s: float = 0.0, *, has_drafts: bool = False) -> None:
        """Note a step that took `seconds`, `lost_s` of them in vain; negative: drafts have gained so much.

        `plain_s` is the time of such a step without drafts.
        """
        if self._balance_s is None:
            self._balance_s = LOAN_STEPS * plain_s
        if has_drafts and lost_s < 0:
            self._grace_ends += 1
        self._balance_s = min(LOAN_STEPS * plain_s, self._balance_s + ALLOWANCE * seconds - lost_s)
