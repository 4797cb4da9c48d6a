"""The number of drafts that each request gets in a step: as many as are worth their time, by recent measurements.

A step of R requests takes T seconds and draws G tokens, G / T of them a second. One more draft, which is accepted with
chance q and adds t seconds, raises that rate if

    q / t > G / T         so the lowest chance that is worth a draft is      threshold = t * G / T

* While the device's memory bandwidth bounds a step, t is nearly 0, and drafts with little chance are worth it. In a
  large batch, or on a CPU, a draft costs as much as a request; then the threshold is 1, and there are no drafts.
* q is estimated for each request from its own drafts, starting from the estimate for all requests (`Acceptance`); T and
  t come from measured steps (`step_cost`).

Nothing is learnt about drafts that are not tried. So a request without drafts gets one now and then, less often each
time that it was wrong; so does the whole batch while the threshold is 1, and soon when a request comes with a
prediction (`pauses`). An `account` bounds what this may cost: while it is negative there are no drafts.

A step that something else delayed makes drafts look dear, and only drafts can correct that. So a try waits until the
account holds its estimated cost, or `_ENOUGH_STEPS`, and `step_cost` forgets. After a few delayed steps drafts are back
within some thousand steps, most of which the account takes to recover.

If a request misses a step because of its drafts, the account is charged with the token that it missed. Such a request
gets drafts only if more than one of them is expected to be accepted.

In a step that also reads prompts, a draft takes the place of a prompt token, so its cost t is taken to be that of a
prompt token. Such steps leave the account alone, as their time says nothing about their drafts.

A drafter on the device makes guesses one step ahead. They take time even if they never become drafts. So a step whose
time is to be measured without guesses makes none (`num_guesses_to_make`), and the account is charged with unused ones.
A draft model that has left tokens unread meanwhile reads them in steps before, which the account is charged with, too.
Guesses are used even if their cost has overdrawn the account: only drafts can pay for them, and for such reading. Where
a step makes all guesses or none, their time does not depend on the number of drafts: it is a part of T, and there are
drafts only if some number of them pays for it. A step with drafts has `MAX_DRAFTED_TOKENS` tokens at most. If these are
too few, only the first requests get drafts, which must pay for all.

A step's result is taken when the next step is launched. If that takes long, as with prompts or late reading, the step
seems longer than it was, and the next one shorter. So its time counts as that without drafts only until there is a
better one, and its delay before late reading is charged to the account.

Everything is a function of the calls; nothing is random.
"""

from __future__ import annotations

from collections.abc import Sequence

from .acceptance import Acceptance, chances
from .account import Account
from .config import MAX_DRAFTED_TOKENS
from .pauses import Rests, Tries
from .step_cost import StepCost

_ENOUGH_STEPS = 2.0  # on the account, for a try at any cost
_LEAST_CHANCE = 0.06  # drafts with less chance are not worth it, however little they cost
_MARGIN = 1.1  # because estimates err, and a draft takes the scheduler's time, too
_FIRST_PRIOR = 0.6  # share of drafts that are accepted, while nothing is known
_KEPT, _WEIGHT = 0.9, 2.0  # for the acceptance of one request; `_KEPT` also for the time of prompts
_KEPT_BY_ALL, _WEIGHT_OF_ALL = 0.99, 4.0
_LONGEST_GUESSES = 4.0  # a step with guesses that took more plain steps than this was delayed by something else
_FIRST_WAIT, _LONGEST_WAIT = 8, 128  # steps before a request without drafts tries one
_REVIEWED = 8  # steps after which the threshold is computed anew, also while the batch stays as it is


class _Tried:
    """Experience with the drafts of one request."""

    __slots__ = ("acceptance", "chances", "misses_step", "step", "wait")

    def __init__(self, most: int, step: int, chances: list[float]) -> None:
        self.acceptance = Acceptance(most, _KEPT, _WEIGHT)
        self.chances = chances
        self.step = step  # the last one with drafts, or the request's first
        self.wait = _FIRST_WAIT
        self.misses_step = False  # because of its newest drafts


class DraftLengths:
    """Decides the number of drafts. For each step, call `begin_step`, then `num_drafts_for` for each decoding request.

    When the step is settled, call `settled` for each request that had drafts, then `observe`, or `observe_prompts` if
    the step also read prompts. Memory: 600 bytes for each request, from its first `num_drafts_for` to `end`.
    """

    def __init__(self, most: int, *, guesses_ahead: bool = False, guesses_most: bool = False) -> None:
        """Create it for at most `most` drafts of one request in a step.

        `guesses_ahead`: a drafter on the device makes them one step ahead. `guesses_most`: it makes `most` guesses in a
        step, or none.
        """
        self._most = most
        self._guesses_ahead = guesses_ahead
        self._guesses_most = guesses_most
        self._cost = StepCost()
        self._account = Account()
        self._tries = Tries()
        self._rests = Rests()
        self._by_all = Acceptance(most, _KEPT_BY_ALL, _WEIGHT_OF_ALL)
        self._shares = self._by_all.shares_from(_FIRST_PRIOR)
        self._tried: dict[str, _Tried] = {}
        self._prompt_s, self._prompt_tokens = 0.0, 0.0  # of steps that read prompts; older ones weigh less
        self._step = 0
        self._threshold, self._limit = 1.0, 0
        self._reviewed = 0  # the step in which the threshold was computed
        self._reviewed_for = (0, False)  # its number of requests, and whether it read prompts
        self._was_plain = False  # the newest settled step had no drafts, guesses or prompts
        self._late_step = -2  # the newest one in which a draft model reads what it has left unread
        self._delay_s = 0.0  # by which the newest settled step was longer, since the next one reads late
        self._guessed_step = 0  # the newest step for which the device makes guesses; the account has paid for them
        self._num_missed = 0  # requests that missed a step because of drafts in the step being settled
        self._has_prompts = self._reads_late = False  # the newest planned step
        self._is_measured = False  # the step makes no guesses, so that its time without them becomes known

    @property
    def num_known(self) -> int:
        """The number of requests whose drafts are remembered."""
        return len(self._tried)

    @property
    def are_worth_it(self) -> bool:
        """False while drafts are not worth their time, or the account forbids them."""
        return self._threshold < 1 and not self._is_overdrawn

    @property
    def _is_overdrawn(self) -> bool:
        has_grace = self._threshold < 1 and self._account.has_grace(self._step)
        return self._account.is_overdrawn and not has_grace

    def should_read_first(self, request_ids: Sequence[str]) -> bool:
        """Return whether a draft model should read in this step what it has left unread, for guesses to follow."""
        has_just_read = self._threshold >= 1 and self._late_step == self._step - 1
        if has_just_read or not self._num_guesses_worth_it(request_ids):
            return False
        self._late_step = self._step
        self._account.begin_grace(self._step)
        return True

    # -------------------------------------------------------------------------------- planning

    def begin_step(self, num_requests: int, num_prompt_tokens: int = 0) -> int:
        """Return the most drafts that any request can get in the next step; with 0, no `num_drafts_for` is needed.

        `num_requests` decode in the step, beside `num_prompt_tokens` tokens of prompts.
        """
        self._step += 1
        self._has_prompts = self._reads_late = False
        self._limit = self._limit_of(num_requests, num_prompt_tokens) if num_requests else 0
        return self._limit

    def planned(self, *, has_prompts: bool, reads_late: bool) -> None:
        """Note what else the step being planned does: it reads prompts, or what a draft model has left unread."""
        self._has_prompts, self._reads_late = has_prompts, reads_late

    def _limit_of(self, num_requests: int, num_prompt_tokens: int) -> int:
        plain_s = self._cost.plain_s(num_requests)
        self._rests.begin_if_due(self._cost.num_plain(num_requests))
        self._is_measured = plain_s is None or self._rests.are_left
        if plain_s is None or not self._account.is_open:
            return 0
        kind = num_requests, num_prompt_tokens > 0
        if self._reviewed_for != kind or self._step - self._reviewed >= _REVIEWED:
            self._reviewed, self._reviewed_for = self._step, kind
            self._threshold = self._threshold_of(*kind, plain_s)
        if self._rests.take():
            return 0
        if self._is_overdrawn and self._guessed_step != self._step:
            return 0
        if self._threshold < 1:
            self._tries.soon()
            return self._most
        return 0 if num_prompt_tokens else self._try_all(num_requests, plain_s)

    def _try_all(self, num_requests: int, plain_s: float) -> int:
        """Give every request one draft that does not look worth it, if the last try was long ago and is paid for."""
        if self._guessed_step != self._step:
            if self._guesses_ahead or not self._may_try(num_requests, plain_s, self._step):
                return 0
            self._tries.begin(self._step, num_requests)
        self._reviewed_for = (0, False)
        self._threshold = 0.0
        self._is_measured = True
        return 1

    def try_soon(self) -> None:
        """Let the next try of the batch be soon."""
        self._tries.soon()

    def _may_try(self, num_requests: int, plain_s: float, step: int) -> bool:
        """Return whether a try is due in `step`, and the account can pay for one draft of each request."""
        if not self._tries.is_due(step, num_requests) or num_requests >= MAX_DRAFTED_TOKENS:
            return False
        if step - self._late_step <= 2:  # the account has paid for it
            return True
        cost_s = num_requests * self._cost.added_s(2 * num_requests, plain_s / num_requests)
        cost_s += (self._most if self._guesses_most else 1) * self._cost.guess_s(num_requests)
        return self._account.covers(min(cost_s, _ENOUGH_STEPS * plain_s))

    def _threshold_of(self, num_requests: int, has_prompts: bool, plain_s: float) -> float:
        """Return the lowest chance that is worth a draft, at the best number of drafts for each request.

        1: none is, or there is no room for any.
        """
        room = MAX_DRAFTED_TOKENS - num_requests
        if room <= 0:
            return 1.0
        request_s = plain_s / num_requests
        best = plain_rate = num_requests / plain_s
        prompt_token_s = self._prompt_s / self._prompt_tokens if self._prompt_tokens else request_s
        beside_prompts_s = min(request_s, prompt_token_s)
        guess_s, always_s = self._cost.guess_s(num_requests) / num_requests, 0.0
        if self._guesses_most:
            guess_s, always_s = 0.0, self._most * self._cost.guess_s(num_requests)
        added_s = self._cost.added_s(2 * num_requests, request_s) + guess_s
        self._shares = self._by_all.shares_from(_FIRST_PRIOR)
        drawn = 0.0  # by the drafts of one request
        for num_drafts, chance in enumerate(chances(self._shares), 1):
            drawn += chance
            num_drafted = min(num_requests, room / num_drafts)  # requests
            num_all = num_drafted * num_drafts
            added_here_s = self._cost.added_s(round(num_requests + num_all), request_s) + guess_s
            each_s = beside_prompts_s if has_prompts else added_here_s
            rate = (num_requests + num_drafted * drawn) / (plain_s + always_s + num_all * each_s)
            if rate > best:
                best, added_s = rate, each_s
        if always_s and best == plain_rate:
            return 1.0
        return max(_LEAST_CHANCE, _MARGIN * (beside_prompts_s * plain_rate if has_prompts else added_s * best))

    def num_drafts_for(self, request_id: str, most: int, *, sits_out: bool = False) -> int:
        """Return the number of drafts for a request that can take up to `most` in this step.

        `sits_out`: if it gets drafts, it misses the next step.
        """
        tried = self._tried.get(request_id)
        if tried is None:
            tried = self._tried[request_id] = _Tried(self._most, self._step, chances(self._shares))
        num_drafts = self._worth(tried, min(most, self._limit), self._step, sits_out=sits_out)
        tried.misses_step = sits_out and num_drafts > 0
        return num_drafts

    def expected(self, request_id: str, most: int) -> int:
        """Estimate the number of drafts that a request may get in the next step, before its `begin_step`.

        `num_drafts_for` will often return fewer, and now and then more.
        """
        if not self._account.is_open or self._is_overdrawn:
            return 0
        if self._threshold >= 1:
            return min(1, most) if self._tries.is_due(self._step + 1) else 0
        tried = self._tried.get(request_id)
        return most if tried is None else self._worth(tried, most, self._step + 1)

    def num_guesses_to_make(self, request_ids: Sequence[str]) -> int:
        """Return how many guesses a drafter on the device makes for each of these requests, for use in the next step.

        None in a step whose time without guesses is to be measured.
        """
        num_guesses = self._num_guesses_worth_it(request_ids)
        if not num_guesses:
            return 0
        self._guessed_step = self._step + 1
        if self._threshold >= 1:
            self._tries.begin(self._guessed_step, len(request_ids))
        return self._most if self._guesses_most else num_guesses

    def _num_guesses_worth_it(self, request_ids: Sequence[str]) -> int:
        """Return about how many guesses for each request are worth their time, or due for a try; 0: none."""
        if self._is_measured or not request_ids:
            return 0
        if self._threshold < 1:
            return max(self.expected(request_id, self._most) for request_id in request_ids)
        plain_s = self._cost.plain_s(len(request_ids))
        return 0 if plain_s is None else int(self._may_try(len(request_ids), plain_s, self._step + 1))

    def _worth(self, tried: _Tried, most: int, step: int, *, sits_out: bool = False) -> int:
        """Return the number of a request's drafts, up to `most`, that are worth their time, or are due for a try."""
        threshold, num_drafts = self._threshold, 0
        for chance in tried.chances[:most]:
            if chance < threshold:
                break
            num_drafts += 1
        if sits_out and sum(tried.chances[:num_drafts]) < _MARGIN:
            num_drafts = 0
        if not num_drafts and step - tried.step >= tried.wait:
            return min(1, most)
        return num_drafts

    # -------------------------------------------------------------------------------- results

    def settled(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Note how many drafts of a request were accepted in a step."""
        if not num_drafts:
            return
        self._by_all.note(num_drafts, num_accepted)
        tried = self._tried.get(request_id)
        if tried is not None:
            self._num_missed += tried.misses_step
            tried.acceptance.note(num_drafts, num_accepted)
            tried.chances = chances(tried.acceptance.shares(self._shares))
            tried.step = self._step
            tried.wait = _FIRST_WAIT if num_accepted else min(2 * tried.wait, _LONGEST_WAIT)

    def observe(
        self,
        num_tokens: int,
        seconds: float,
        num_drafts: int = 0,
        num_accepted: int = 0,
        num_guesses: int = 0,
        *,
        reads_late: bool = False,
    ) -> None:
        """Note the time of a step that only decoded: `num_tokens`, its drafts included.

        `seconds` is the time since the step before it ended, or since it was planned, if that was later. The step also
        made `num_guesses` for each request, for the next step: they are part of the cost of drafts. So is what a draft
        model read of earlier steps, if it `reads_late`.
        """
        num_requests = num_tokens - num_drafts
        num_missed, self._num_missed = self._num_missed, 0
        is_plain = not (num_drafts or num_guesses or reads_late)
        follows_plain, self._was_plain = self._was_plain, is_plain
        delay_s, self._delay_s = self._delay_s, 0.0
        if num_requests <= 0 or seconds <= 0:
            return
        if is_plain:
            is_exact = follows_plain and not (self._has_prompts or self._reads_late)
            self._cost.note_plain(num_requests, seconds, is_exact=is_exact)
        plain_s = self._cost.plain_s(num_requests)
        if plain_s is None:
            return
        lost_s = 0.0
        if not num_drafts and (not is_plain or self._reads_late):
            lost_s = max(-delay_s, min(seconds, _LONGEST_GUESSES * plain_s) - plain_s)
            if is_plain:
                lost_s = self._delay_s = max(0.0, lost_s)
            elif not reads_late:
                lost_s = max(0.0, lost_s)
                self._cost.note_guesses(num_requests, num_guesses, lost_s)
        if num_drafts:
            self._rests.note_drafts(is_estimated=self._cost.num_plain(num_requests) == 0)
            self._tries.note_drafts(self._step)
            guesses_s = num_guesses * self._cost.guess_s(num_requests)
            seconds = min(seconds, self._cost.longest_s(num_requests, num_drafts, plain_s) + guesses_s)
            self._cost.note_drafts(num_requests, num_drafts, max(plain_s, seconds - guesses_s), plain_s)
            lost_s = seconds - plain_s * (num_requests + num_accepted - num_missed) / num_requests
        self._account.note(seconds, plain_s, lost_s, has_drafts=num_drafts > 0)

    def observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step of `num_tokens` tokens, most of them of prompts."""
        self._num_missed, self._was_plain, self._delay_s = 0, False, 0.0
        self._prompt_s = _KEPT * self._prompt_s + seconds
        self._prompt_tokens = _KEPT * self._prompt_tokens + num_tokens

    def end(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._tried.pop(request_id, None)
