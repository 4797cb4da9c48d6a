"""A whole engine core with a drafter, on a device whose steps take the time of a formula, by a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

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
BUDGET = 16384  # tokens in a step


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a step, about those of an 8B model on a GPU."""

    step: float = 3.75e-3  # reading the weights
    token: float = 22e-6  # in a step of so many that products bound it
    request: float = 36e-6  # attention of one decode
    guess: float = 0.3e-3  # one guess for all requests; the first of a model is what it reads
    request_guess: float = 5e-6
    unread_token: float = 0.0  # what a draft model reads; 0: the drafter is a head, which leaves nothing unread
    host: float = 0.3e-3  # planning


HEAD = Times()
MODEL = Times(guess=1.2e-3, request_guess=25e-6, unread_token=2.5e-6)


class VirtualGpu:
    """A `Runner` that accepts each draft with a given chance. Steps run one after the other."""

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
        seconds = max(times.step, times.token * plan.num_tokens) + times.request * num_decodes
        seconds += plan.num_guesses * (times.guess + times.request_guess * num_decodes)
        if times.unread_token:  # beyond that of the newest token of each decode
            seconds += times.unread_token * max(0, self._read(plan) - num_decodes)
        self.now_s += times.host
        self._free_s = max(self._free_s, self.now_s) + seconds * self._draw.uniform(0.98, 1.02)
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

    def __init__(self, times: Times, *, drafts: bool, rate: float = 0.9, budget: int = BUDGET) -> None:
        config = EngineCoreConfig(
            num_blocks=90_000,
            max_num_seqs=512,
            max_num_batched_tokens=budget,
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
            most_read=budget if times.unread_token else None,
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


def times_without(times: Times, lengths: Sequence[int], num_bursts: int = 1, **sampling: int) -> list[float]:
    """Return, for each of several equal bursts, how many times as fast an engine is that may draft."""
    with_drafts, without = (Engine(times, drafts=drafts) for drafts in (True, False))
    for engine in (with_drafts, without):  # prompts are cached then
        engine.burst([1] * len(lengths))
    plain_s = without.burst(lengths, **sampling)
    return [plain_s / with_drafts.burst(lengths, **sampling) for _ in range(num_bursts)]
