"""The number of drafts that each request gets in a step: as many as are worth their time, by what was measured.

A step of R requests takes T seconds and draws G tokens, G / T of them a second. One more draft, which is accepted with
chance q and adds t seconds, raises that where

    q / t > G / T         so the lowest chance that is worth a draft is      threshold = t * G / T

* Where steps are bound by the device's memory, t is nearly 0, and drafts with little chance are worth it. In a large
  batch, or on a CPU, a draft costs as much as a request does; then the threshold is 1, and there are none.
* q is estimated for each request from its own drafts, beginning with those of all requests (`Acceptance`), T and t from
  steps that were measured (`step_cost`).

What is not tried is not learnt. So a request without drafts gets one now and then, more seldom each time that it was
wrong, and so does the whole batch where the threshold is 1. What this may cost is bounded by an account:

    each step      + `ALLOWANCE` of its time
    with drafts    - its time beyond that of steps without drafts for as many tokens

It holds `LOAN_STEPS` steps at first and at most. While it is overdrawn there are no drafts. So whatever the estimates
are worth, speculation makes n steps longer by no more than `ALLOWANCE` + (`LOAN_STEPS` + steps in flight) / n. After
`MOST_IN_A_ROW` steps with drafts one has none, which keeps the time of such steps known.

A request that misses a step for its drafts loses the token of that step, which the account is debited with. It has
drafts where more than one of them is expected to be accepted.

In a step that reads prompts, too, a draft takes the place of a prompt token, and is taken to cost as much (t). The
account does not see such steps, as their time says nothing about their drafts.

A drafter on the device makes guesses a step ahead. They take time whether or not drafts come of them, so a step that
is to measure others makes none (`made_ahead`), and the account is debited with those that were made in vain.

All is a function of the calls, and nothing is drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .step_cost import StepCost

ALLOWANCE = 0.015  # share of the time that may be lost to drafts
LOAN_STEPS = 3.0
MOST_IN_A_ROW = 64
_LEAST_CHANCE = 0.06  # of a draft, however little it costs
_MARGIN = 1.1  # estimates err, and a draft costs the scheduler time, too
_FIRST_PRIOR = 0.6  # share of drafts accepted, before the first
_KEPT, _WEIGHT = 0.9, 2.0  # of one request's acceptance, and of the time of prompts
_KEPT_BY_ALL, _WEIGHT_OF_ALL = 0.99, 4.0
_LONGEST_GUESSES = 4.0  # plain steps: a step that made guesses and took longer was kept by something else
_FIRST_WAIT, _LONGEST_WAIT = 8, 128  # steps before a request without drafts tries one
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 2048  # steps before a batch without drafts tries them
_REVIEWED = 8  # steps between two looks at the threshold of a batch of one size


class _Tried:
    """The drafts of one request."""

    __slots__ = ("acceptance", "chances", "misses_step", "step", "wait")

    def __init__(self, most: int, step: int, chances: list[float]) -> None:
        self.acceptance = Acceptance(most, _KEPT, _WEIGHT)
        self.chances = chances
        self.step = step  # in which it last had drafts
        self.wait = _FIRST_WAIT
        self.misses_step = False  # for its newest drafts


class DraftLengths:
    """Decides the number of drafts. Of each step call `begin_step`, then `of` each request that decodes in it.

    When it has settled, call `settled` for each request that had drafts, and `observe`, or `observe_prompts` where it
    read prompts, too. Memory: 600 bytes a request, from its first `of` to `end`.
    """

    def __init__(self, most: int) -> None:
        """`most`: drafts of one request in a step."""
        self._most = most
        self._cost = StepCost()
        self._by_all = Acceptance(most, _KEPT_BY_ALL, _WEIGHT_OF_ALL)
        self._shares = self._by_all.shares_from(_FIRST_PRIOR)
        self._tried: dict[str, _Tried] = {}
        self._prompt_s, self._prompt_tokens = 0.0, 0.0  # of steps that read prompts, older ones counting less
        self._account_s: float | None = None  # None: no step was measured
        self._step = 0
        self._threshold, self._limit = 1.0, 0
        self._reviewed = 0  # the step of the newest threshold
        self._reviewed_for = (0, False)  # requests, and whether there were prompts
        self._in_a_row = 0  # steps with drafts
        self._last_drafts, self._pause = 0, _FIRST_PAUSE
        self._promised = 0  # the step for which guesses were made to try drafts in it
        self._num_missed = 0  # steps of requests that had drafts in the step that is being settled
        self._is_measured = False  # whether no guesses are made in the step, so that the time of the rest is known

    @property
    def num_known(self) -> int:
        """Return the number of requests whose drafts are remembered."""
        return len(self._tried)

    # -------------------------------------------------------------------------------- planning

    def begin_step(self, num_requests: int, num_prompt_tokens: int = 0) -> int:
        """Return the most drafts that a request can get in the next step; 0: nobody need be asked.

        `num_requests` decode in it, beside tokens of prompts.
        """
        self._step += 1
        self._limit = self._limit_of(num_requests, num_prompt_tokens) if num_requests else 0
        return self._limit

    def _limit_of(self, num_requests: int, num_prompt_tokens: int) -> int:
        plain_s = self._cost.plain_s(num_requests)
        self._is_measured = plain_s is None or self._in_a_row >= MOST_IN_A_ROW
        if plain_s is None or self._account_s is None:
            return 0
        if self._account_s < 0 and self._promised != self._step:
            return 0
        if self._in_a_row >= MOST_IN_A_ROW:
            self._in_a_row = 0
            return 0
        kind = num_requests, num_prompt_tokens > 0
        if self._reviewed_for != kind or self._step - self._reviewed >= _REVIEWED:
            self._reviewed, self._reviewed_for = self._step, kind
            self._threshold = self._threshold_of(*kind, plain_s)
        if self._threshold < 1:
            self._pause = _FIRST_PAUSE
            return self._most
        return 0 if num_prompt_tokens else self._try_all(num_requests, plain_s)

    def _try_all(self, num_requests: int, plain_s: float) -> int:
        """Let every request have a draft although it does not look worth it, if that was long ago and is paid for."""
        if self._promised != self._step:
            if not self._may_try(num_requests, plain_s, self._step):
                return 0
            self._begin_try(self._step)
        self._reviewed_for = (0, False)
        self._threshold = 0.0
        self._is_measured = True
        return 1

    def _may_try(self, num_requests: int, plain_s: float, step: int) -> bool:
        """Return whether the last drafts are long ago at a step, and a draft of each request is paid for."""
        if step - self._last_drafts < self._pause or self._account_s is None:
            return False
        cost_s = num_requests * self._cost.added_s(2 * num_requests, plain_s / num_requests)
        return self._account_s >= cost_s + self._cost.guess_s(num_requests)

    def _begin_try(self, step: int) -> None:
        """Try drafts in a step, and wait twice as long until the next try."""
        self._last_drafts = step
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _threshold_of(self, num_requests: int, has_prompts: bool, plain_s: float) -> float:
        """Return the lowest chance that is worth a draft, at the best number of drafts for all requests alike."""
        as_request_s = plain_s / num_requests
        best, drawn = num_requests / plain_s, float(num_requests)
        if has_prompts:
            prompt_token_s = self._prompt_s / self._prompt_tokens if self._prompt_tokens else as_request_s
            return max(_LEAST_CHANCE, _MARGIN * best * min(as_request_s, prompt_token_s))
        guess_s = self._cost.guess_s(num_requests) / num_requests
        added_s = self._cost.added_s(2 * num_requests, as_request_s) + guess_s
        self._shares = self._by_all.shares_from(_FIRST_PRIOR)
        for num_drafts, chance in enumerate(chances(self._shares), 1):
            drawn += num_requests * chance
            each_s = self._cost.added_s(num_requests * (1 + num_drafts), as_request_s) + guess_s
            rate = drawn / (plain_s + num_requests * num_drafts * each_s)
            if rate > best:
                best, added_s = rate, each_s
        return max(_LEAST_CHANCE, _MARGIN * added_s * best)

    def of(self, request_id: str, most: int, *, sits_out: bool = False) -> int:
        """Return the number of drafts for a request that can take up to `most` in this step.

        `sits_out`: with drafts it misses the next step.
        """
        tried = self._tried.get(request_id)
        if tried is None:
            tried = self._tried[request_id] = _Tried(self._most, self._step, chances(self._shares))
        num_drafts = self._worth(tried, min(most, self._limit), self._step, sits_out=sits_out)
        tried.misses_step = sits_out and num_drafts > 0
        return num_drafts

    def expected(self, request_id: str, most: int) -> int:
        """Return the number of drafts that a request may get in the next step, for which `begin_step` was not called.

        It may be more than `of` allows then, and now and then less.
        """
        if self._account_s is None or self._account_s < 0:
            return 0
        if self._threshold >= 1:
            is_next_tried = self._step + 1 - self._last_drafts >= self._pause
            return min(1, most) if is_next_tried else 0
        tried = self._tried.get(request_id)
        return most if tried is None else self._worth(tried, most, self._step + 1)

    def made_ahead(self, request_ids: Sequence[str]) -> int:
        """Return how many guesses a drafter on the device makes for each of these requests in this step, for the next.

        None in a step whose time is to be known without them.
        """
        if self._is_measured or not request_ids:
            return 0
        if self._threshold >= 1:
            plain_s = self._cost.plain_s(len(request_ids))
            if plain_s is None or not self._may_try(len(request_ids), plain_s, self._step + 1):
                return 0
            self._promised = self._step + 1
            self._begin_try(self._promised)
            return 1
        return max(self.expected(request_id, self._most) for request_id in request_ids)

    def _worth(self, tried: _Tried, most: int, step: int, *, sits_out: bool = False) -> int:
        """Return the number of a request's drafts, up to `most`, that are worth their time or are due to be tried."""
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
        self, num_tokens: int, seconds: float, num_drafts: int = 0, num_accepted: int = 0, num_guesses: int = 0
    ) -> None:
        """Note the time of a step that only decoded: `num_tokens` with all of its drafts.

        `seconds` passed since the step before it ended, or since it was planned if that was later. `num_guesses` of
        each request were made in it for the next step, which is part of what drafts cost.
        """
        num_requests = num_tokens - num_drafts
        num_missed, self._num_missed = self._num_missed, 0
        if num_requests <= 0 or seconds <= 0:
            return
        if not num_drafts and not num_guesses:
            self._cost.note_plain(num_requests, seconds)
        plain_s = self._cost.plain_s(num_requests)
        if plain_s is None:
            return
        if self._account_s is None:
            self._account_s = LOAN_STEPS * plain_s
        lost_s = 0.0
        if num_guesses and not num_drafts:
            lost_s = max(0.0, min(seconds, _LONGEST_GUESSES * plain_s) - plain_s)
            self._cost.note_guesses(num_requests, num_guesses, lost_s)
        if num_drafts:
            self._in_a_row += 1
            self._last_drafts = self._step
            guesses_s = num_guesses * self._cost.guess_s(num_requests)
            seconds = min(seconds, self._cost.longest_s(num_requests, num_drafts, plain_s) + guesses_s)
            self._cost.note_drafts(num_requests, num_drafts, max(plain_s, seconds - guesses_s), plain_s)
            lost_s = seconds - plain_s * (num_requests + num_accepted - num_missed) / num_requests
        self._account_s = min(LOAN_STEPS * plain_s, self._account_s + ALLOWANCE * seconds - lost_s)

    def observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step of so many tokens, most of them of prompts."""
        self._num_missed = 0
        self._prompt_s = _KEPT * self._prompt_s + seconds
        self._prompt_tokens = _KEPT * self._prompt_tokens + num_tokens

    def end(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._tried.pop(request_id, None)


class Acceptance:
    """The share of drafts that are accepted at each position, of those whose drafts before them were accepted.

    Older drafts count less: a share is the mean of about 1 / (1 - `kept`) drafts, and of a prior that weighs as much as
    `weight` drafts.
    """

    __slots__ = ("_accepted", "_checked", "_kept", "_weight")

    def __init__(self, most: int, kept: float, weight: float) -> None:
        """`most`: drafts of one request in a step."""
        self._checked = [0.0] * most
        self._accepted = [0.0] * most
        self._kept = kept
        self._weight = weight

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` of so many drafts were right; those behind a wrong one tell nothing."""
        kept, checked, accepted = self._kept, self._checked, self._accepted
        for position in range(num_accepted):
            checked[position] = kept * checked[position] + 1
            accepted[position] = kept * accepted[position] + 1
        if num_accepted < num_drafts:
            checked[num_accepted] = kept * checked[num_accepted] + 1
            accepted[num_accepted] *= kept

    def shares(self, priors: Iterable[float]) -> list[float]:
        """Return the share at each position; `priors` are what is believed without any draft."""
        weight = self._weight
        return [
            (accepted + weight * prior) / (checked + weight)
            for checked, accepted, prior in zip(self._checked, self._accepted, priors, strict=True)
        ]

    def shares_from(self, prior: float) -> list[float]:
        """Return the share at each position, where the one before it is the prior of the next."""
        weight, shares = self._weight, []
        for checked, accepted in zip(self._checked, self._accepted, strict=True):
            prior = (accepted + weight * prior) / (checked + weight)
            shares.append(prior)
        return shares


def chances(shares: list[float]) -> list[float]:
    """Return for each position the chance that its draft and all before it are accepted."""
    chance, result = 1.0, []
    for share in shares:
        chance *= share
        result.append(chance)
    return result
