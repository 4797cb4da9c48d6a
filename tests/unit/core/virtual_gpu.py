"""A whole engine core with a drafter, on a device whose steps take the time of a formula, by a clock of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.messages import EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.speculation.drafter import DeviceDrafter
from baton.engine.core.step import Chunk, ChunkResult, StepPlan, StepResult

PROMPT_LEN = 512
MOST_DRAFTS = 3
BUDGET = 4096  # tokens in a step


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a step, about those of an 8B model on a GPU."""

    step: float = 3.75e-3  # reading the weights
    token: float = 22e-6  # in a step of so many that products bound it
    request: float = 36e-6  # attention of one decode
    guess: float = 0.3e-3  # one guess for all requests, or one read of a draft model
    request_guess: float = 5e-6
    unread_token: float = 0.0  # what a draft model reads; 0: the drafter is a head, which leaves nothing unread
    host: float = 0.3e-3  # planning
    captured: int = 1024  # the most tokens of a captured step; later reads take several captured ones
    launch: float = 25e-3  # of the host, for a step or a read that is not captured
    captures_reads: bool = True  # those of captured steps


HEAD = Times()
MODEL = Times(guess=1.2e-3, request_guess=25e-6, unread_token=2.5e-6)
# Guesses for a full batch would pay if all of its requests had room for their drafts.
QUICK_MODEL = replace(MODEL, guess=0.9e-3, request_guess=16e-6)


class VirtualGpu:
    """A `Runner` that accepts each draft with a given chance. Steps run one after the other.

    The host is busy while it launches, so it may take a result later than the device has it. The device cannot end
    before all is launched.
    """

    def __init__(self, times: Times, rate: float) -> None:
        self.now_s = 0.0
        self._times, self._rate, self._draw = times, rate, random.Random(0)
        self._free_s = 0.0  # when all steps so far have ended
        self._unread: dict[int, int] = {}  # by row
        self._num_known: dict[int, int] = {}
        self._is_behind: dict[int, bool] = {}

    def clock(self) -> float:
        return self.now_s

    def launch(self, plan: StepPlan) -> _Launched:
        times = self._times
        for start in plan.started_rows:
            self._unread[start.row], self._num_known[start.row] = 0, len(start.prompt_token_ids)
        num_decodes = sum(chunk.samples and chunk.num_tokens == 1 + chunk.num_drafts for chunk in plan.chunks)
        is_captured = plan.num_tokens <= times.captured
        seconds = max(times.step, times.token * plan.num_tokens) + times.request * num_decodes
        num_uncaptured, num_runs, num_rounds = int(not is_captured), plan.num_guesses, plan.num_guesses
        if times.unread_token and (num_read := self._read(plan)):
            num_reads = math.ceil(num_read / times.captured) if is_captured and times.captures_reads else 1
            num_uncaptured += num_read > times.captured * num_reads
            num_runs, num_rounds = max(0, num_runs - 1) + num_reads, max(1, num_rounds)
            # With guesses, the newest token of each decode is a part of the first.
            seconds += times.unread_token * (num_read - num_decodes * (plan.num_guesses > 0))
        seconds += times.guess * num_runs + times.request_guess * num_decodes * num_rounds
        self.now_s += times.host
        self._free_s = max(self._free_s, self.now_s) + seconds * self._draw.uniform(0.98, 1.02)
        self.now_s += times.launch * num_uncaptured
        self._free_s = max(self._free_s, self.now_s)
        return _Launched(self, plan, self._free_s)

    def _read(self, plan: StepPlan) -> int:
        """Return how many tokens a draft model reads after a step."""
        for chunk in plan.chunks:
            assert not chunk.num_drafts or not self._is_behind[chunk.row], "drafts that follow tokens it has not read"
            self._unread[chunk.row] += chunk.num_tokens
        default = 0 if plan.num_guesses else len(plan.chunks)
        first = default if plan.reads_from is None else plan.reads_from
        self._is_behind |= {chunk.row: number < first for number, chunk in enumerate(plan.chunks)}
        return sum(
            self._unread_of(chunk.row)
            for number, chunk in enumerate(plan.chunks)
            if number >= first or chunk.start < self._num_known[chunk.row]
        )

    def _unread_of(self, row: int) -> int:
        """Return how many tokens of the row are unread, and count them as read."""
        count, self._unread[row] = self._unread[row], 0
        return count

    def drawn(self, chunk: Chunk) -> ChunkResult:
        num_accepted = 0
        while num_accepted < chunk.num_drafts and self._draw.random() < self._rate:
            num_accepted += 1
        return ChunkResult([7] * (num_accepted + 1) if chunk.samples else [])


@dataclass
class _Launched:
    gpu: VirtualGpu
    plan: StepPlan
    ends_s: float

    def result(self) -> StepResult:
        self.gpu.now_s = max(self.gpu.now_s, self.ends_s)
        return StepResult(self.plan.step, [self.gpu.drawn(chunk) for chunk in self.plan.chunks])


class Engine:
    """An engine on such a device, which drafts or not, with cached prompts after the first burst."""

    def __init__(self, times: Times, *, drafts: bool, rate: float = 0.9) -> None:
        config = EngineCoreConfig(
            num_blocks=90_000,
            max_num_seqs=512,
            max_num_batched_tokens=BUDGET,
            max_model_len=8192,
            vocab_size=1000,
        )
        self._gpu = VirtualGpu(times, rate)
        drafting = Drafting(
            DeviceDrafter(),
            MOST_DRAFTS,
            edits_on_host=True,
            on_device=True,
            guesses_most=True,
            most_read=BUDGET if times.unread_token else None,
        )
        scheduler = Scheduler(config, clock=self._gpu.clock, drafting=drafting if drafts else None)
        self._core = EngineCore(scheduler, self._gpu)

    def burst(self, lengths: Sequence[int], **sampling: int) -> float:
        """Return the seconds until requests that come together, with answers of these lengths, have ended."""
        began_s = self._gpu.now_s
        for number, length in enumerate(lengths):
            params = SamplingParams(max_tokens=length, ignore_eos=True, **sampling)  # type: ignore[arg-type]
            name = f"{began_s}/{number}"
            self._core.add(EngineRequest(request_id=name, prompt_token_ids=[number] * PROMPT_LEN, sampling=params))
        while self._core.has_work():
            self._core.step()
        return self._gpu.now_s - began_s


def times_without(
    times: Times, lengths: Sequence[int], num_bursts: int = 1, *, rate: float = 0.9, **sampling: int
) -> list[float]:
    """Return, for each of several equal bursts, how many times as fast an engine is that may draft."""
    with_drafts, without = (Engine(times, drafts=drafts, rate=rate) for drafts in (True, False))
    for engine in (with_drafts, without):  # prompts are cached then
        engine.burst([1] * len(lengths))
    plain_s = without.burst(lengths, **sampling)
    return [plain_s / with_drafts.burst(lengths, **sampling) for _ in range(num_bursts)]
