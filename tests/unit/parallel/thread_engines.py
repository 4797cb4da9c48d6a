"""Engines of one group whose ranks are threads: real models, schedulers, lockstep and dispatch, and no processes.

with ThreadEngines(folder, tp=2, dp=2, spread=ExpertSpread()) as engines:
    engines.submit(1, request("a", ...))          to data-parallel rank 1
    tokens = engines.wait("a")
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.lockstep import Lockstep
from baton.engine.core.messages import EngineOutput, EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.speculation.drafter import DeviceDrafter
from baton.engine.core.step import PendingStep, Runner, StepPlan
from baton.engine.layers.decoder import CausalLM
from baton.engine.models import load_config, load_model
from baton.engine.parallel.groups import ExpertSpread, ParallelGroups
from baton.engine.worker.backends.cpu import CpuBackend
from baton.engine.worker.backends.cpu_shapes import CpuShapes
from baton.engine.worker.backends.cuda import CudaBackend
from baton.engine.worker.backends.cuda_shapes import CudaShapes
from baton.engine.worker.expert_balance import ExpertBalancer, ReviewingRunner
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits
from baton.engine.worker.tables import CacheArenas

from ...helpers.inline_stream import InlineStream
from ...helpers.kv_memory import allocate_kv
from ...helpers.thread_groups import TIMEOUT_S, run_threads, thread_groups


def request(request_id: str, prompt: list[int], max_tokens: int, **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, seed=len(prompt))


def prompt(length: int, seed: int) -> list[int]:
    return [3 + (seed * 37 + 11 * position * position) % 250 for position in range(length)]


# Prompts have different lengths, so that ranks finish at different times; one is longer than a step.
REQUESTS = [
    request("a", prompt(40, 1), 12),
    request("b", prompt(7, 2), 20),
    request("c", prompt(18, 3), 5, temperature=0.8, top_k=30),
    request("d", prompt(1, 4), 16),
    request("e", prompt(33, 5), 1),
    request("f", prompt(21, 6), 9, temperature=1.0, presence_penalty=0.5),
]


class _Told(Runner):
    """A leader's runner, which sends its plans to the followers of its tensor-parallel group, too."""

    def __init__(self, runner: Runner, followers: list[queue.SimpleQueue[StepPlan | None]]) -> None:
        self._runner = runner
        self._followers = followers
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        for follower in self._followers:
            follower.put(plan)
        return self._runner.launch(plan)


class ThreadEngines:
    def __init__(
        self,
        folder: Path,
        *,
        tp: int = 1,
        dp: int = 1,
        spread: ExpertSpread | None = None,
        num_blocks: int = 64,
        max_num_batched_tokens: int = 32,
        depth: int = 1,
        review_experts_every: int = 0,
        moves_experts: bool = False,
        captured_tokens: int | None = None,
        num_drafts: int = 0,
        drafting_ranks: Sequence[int] = (),
    ) -> None:
        """Make engines on `tp * dp` ranks. With `captured_tokens`, they have the runners of GPUs: see `_device_runner`.

        With `num_drafts`, the model's draft layer runs, and requests of `drafting_ranks` have up to so many drafts.
        """
        config = load_config(folder)
        self._config = config.with_draft_layers() if num_drafts else config
        self._num_drafts = num_drafts
        self._core_config = EngineCoreConfig(
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=128,
            vocab_size=self._config.vocab_size,
            depth=depth,
        )
        self._moves_experts = moves_experts
        self._captured_tokens = captured_tokens
        self._capture: list[ModelRunner] = []
        self._groups = thread_groups(tp, dp, spread)
        self._bells = [threading.Event() for _ in range(dp)]
        self._inboxes: list[deque[EngineRequest]] = [deque() for _ in range(dp)]
        self._answers: dict[str, queue.SimpleQueue[EngineOutput]] = {}
        self._closing = False
        self.errors: list[BaseException] = []
        self.cores: list[EngineCore] = []
        self.runners: list[_Told] = []
        lanes: list[queue.SimpleQueue[StepPlan | None]] = [queue.SimpleQueue() for _ in range(tp * dp)]
        self._lanes = lanes
        self._locksteps: list[Lockstep] = []
        made = [self._runner(groups) for groups in self._groups]
        self.balancers = [balancer for _, balancer in made]
        if self._capture:  # all ranks at once, as they take part in each other's collectives
            run_threads([runner.capture for runner in self._capture], self._abort)
        self.device_runners = self._capture
        for rank in range(dp):
            told = _Told(made[rank * tp][0], lanes[rank * tp + 1 : (rank + 1) * tp])
            dp_group = self._groups[rank * tp].dp
            self.runners.append(told)
            lockstep = None
            if spread is not None:
                lockstep = Lockstep(
                    rank, dp, dp_group.all_max, self._waker(rank), review_experts_every=review_experts_every
                )
                self._locksteps.append(lockstep)
            drafting = None
            if rank in drafting_ranks:
                is_gpu = captured_tokens is not None
                drafting = Drafting(DeviceDrafter(), num_drafts, adapts=False, edits_on_host=is_gpu, on_device=True)
            self.cores.append(EngineCore(Scheduler(self._core_config, drafting=drafting), told, lockstep=lockstep))
            self.cores[-1].when_woken(self._bells[rank].set)
        self._leaders = [threading.Thread(target=self._lead, args=(rank,), daemon=True) for rank in range(dp)]
        self._followers = [
            threading.Thread(target=self._follow, args=(made[rank][0], lanes[rank]), daemon=True)
            for rank in range(tp * dp)
            if rank % tp
        ]

    def __enter__(self) -> Self:
        for thread in (*self._leaders, *self._followers):
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        for bell in self._bells:
            bell.set()
        if error is not None or self.errors:
            self._abort()
        for threads in (self._leaders, self._followers):  # leaders first, as a lane ends after its leader
            for thread in threads:
                thread.join(TIMEOUT_S)
                assert not thread.is_alive()
            for lane in self._lanes:
                lane.put(None)
        if self.errors and error is None:
            raise self.errors[0]

    def submit(self, rank: int, *requests: EngineRequest) -> None:
        for each in requests:
            self._answers[each.request_id] = queue.SimpleQueue()
            self._inboxes[rank].append(each)
        self._bells[rank].set()

    def outputs(self, request_id: str) -> list[EngineOutput]:
        """Wait for all outputs of a request, and return them."""
        found: list[EngineOutput] = []
        while not found or found[-1].finish_reason is None:
            found.append(self._answers[request_id].get(timeout=TIMEOUT_S))
        return found

    def wait(self, request_id: str) -> list[int]:
        """Wait for the tokens of a request, and return them."""
        return [token for output in self.outputs(request_id) for token in output.token_ids]

    def _runner(self, groups: ParallelGroups) -> tuple[Runner, ExpertBalancer | None]:
        model = load_model(self._config, groups=groups)
        layout = self._config.caches.of_rank(groups.tp.rank, groups.tp.size).only.blocks
        kv = allocate_kv(layout, self._core_config.num_blocks)
        runner = self._cpu_runner(model, kv) if self._captured_tokens is None else self._device_runner(model, kv)
        balancer = ExpertBalancer.of(model, groups, moves=self._moves_experts)
        if balancer is not None:
            runner = ReviewingRunner(runner, balancer, nullcontext)
        return runner, balancer

    def _limits(self) -> StepLimits:
        sizes, drafts = self._core_config, self._num_drafts
        return StepLimits(
            sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len, drafts, guesses_on_device=drafts > 0
        )

    def _cpu_runner(self, model: CausalLM, kv: torch.Tensor) -> Runner:
        limits = self._limits()
        return ModelRunner(
            model, CacheArenas([kv]), CpuBackend(CpuShapes(limits)), limits, self._core_config.vocab_size
        )

    def _device_runner(self, model: CausalLM, kv: torch.Tensor) -> Runner:
        """Return a GPU's runner with "captured" steps of up to `captured_tokens` tokens, with none if it is 0."""
        limits = self._limits()
        shapes = CudaShapes(limits, max_tokens=self._captured_tokens or 0)
        backend = CudaBackend(InlineStream(), shapes, torch.float32)
        runner = ModelRunner(
            model, CacheArenas([kv.fill_(float("nan"))]), backend, limits, self._core_config.vocab_size
        )
        if self._captured_tokens:
            self._capture.append(runner)
        return runner

    def _waker(self, rank: int):  # type: ignore[no-untyped-def]
        def wake_others(wave: int) -> None:
            for other, lockstep in enumerate(self._locksteps):
                if other != rank:
                    lockstep.on_wake(wave)

        return wake_others

    def _lead(self, rank: int) -> None:
        core, bell, inbox = self.cores[rank], self._bells[rank], self._inboxes[rank]
        try:
            while not self._closing or core.has_work():
                while inbox:
                    core.add(inbox.popleft())
                for output in core.step():
                    self._answers[output.request_id].put(output)
                if not core.has_work() and not inbox and not self._closing:
                    bell.wait(TIMEOUT_S)
                    bell.clear()
        except BaseException as error:
            self._fail(error)

    def _follow(self, runner: Runner, lane: queue.SimpleQueue[StepPlan | None]) -> None:
        try:
            while (plan := lane.get()) is not None:
                runner.launch(plan).result()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self._abort()

    def _abort(self) -> None:
        for groups in self._groups:
            for group in (groups.tp, groups.dp, groups.ep):
                group.close()
