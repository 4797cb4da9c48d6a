"""When a batch without drafts tries them again, and when one with drafts does without for a moment.

Nothing is learnt about drafts that are not tried, so a batch for which they are not worth it tries them now and then,
less often each time. And the time without drafts, with which all else is compared, must stay known while there are
drafts: so `_RESTS` steps without follow `MOST_IN_A_ROW` with drafts, and fewer while it rests on few measurements.
"""

from __future__ import annotations

MOST_IN_A_ROW = 128
_RESTS = 2  # steps, of which only the last one counts (`step_cost`)
_MANY = 6  # measurements of steps without drafts; with each one less, half as many steps with drafts in a row
_MOST_ESTIMATED = 16  # steps with drafts whose time without them is only an estimate, between rests
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 2048  # steps before a batch without drafts tries them


class Tries:
    """Steps in which all requests get drafts that do not look worth their time."""

    def __init__(self) -> None:
        self._last_drafts, self._pause = 0, _FIRST_PAUSE
        self._num_requests = 0  # in the step of the last try

    def soon(self) -> None:
        """Let the next try be soon, as for a batch that had drafts lately: its drafts may be better than those before.

        The account bounds the cost of tries as ever.
        """
        self._pause = _FIRST_PAUSE

    def is_due(self, step: int, num_requests: int | None = None) -> bool:
        """Return whether the last drafts were long before `step`.

        With half as many requests as in the last try, drafts are cheaper, and need not have been long before.
        """
        is_smaller = num_requests is not None and 2 * num_requests <= self._num_requests
        return step - self._last_drafts >= (_FIRST_PAUSE if is_smaller else self._pause)

    def begin(self, step: int, num_requests: int) -> None:
        """Note that `step` tries drafts, and double the time until the next try."""
        self._last_drafts, self._num_requests = step, num_requests
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def note_drafts(self, step: int) -> None:
        """Note a step with drafts, tried or worth it."""
        self._last_drafts = step


class Rests:
    """Steps without drafts, so that their time stays known."""

    def __init__(self) -> None:
        self._in_a_row = 0  # steps with drafts since the last rest
        self._num_estimated = 0  # those of them whose time without drafts is only an estimate
        self._num_left = 0  # steps that are to have no drafts

    @property
    def are_left(self) -> bool:
        return self._num_left > 0

    def begin_if_due(self, num_plain: int) -> None:
        """`num_plain`: how many measurements the time without drafts rests on; 0: it is an estimate."""
        if num_plain:
            is_due = self._in_a_row >= MOST_IN_A_ROW >> max(0, _MANY - num_plain)
        else:
            is_due = self._num_estimated >= _MOST_ESTIMATED
        if is_due:
            self._in_a_row, self._num_estimated, self._num_left = 0, 0, _RESTS

    def take(self) -> bool:
        """Return whether the step being planned is one, and count it."""
        if not self._num_left:
            return False
        self._num_left -= 1
        return True

    def note_drafts(self, *, is_estimated: bool) -> None:
        """Note a step with drafts. `is_estimated`: its time without them is only an estimate."""
        self._in_a_row += 1
        self._num_estimated += is_estimated
