"""Steps that nobody asked for, run before ready: kernels are compiled, and what the largest step takes is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from baton.kernels.mla import MAX_EXPANDED_TOKENS

from ...core.layout import BLOCK_SIZE
from ...core.sampling import MAX_LOGPROBS
from ...core.step import Chunk, RowStart, StepPlan
from ...layers.base import Layer
from ...parallel.balance import spread_experts
from ...parallel.groups import ParallelGroups
from ..warmup import EVERY_KIND
from .runner import DeviceRunner
from .shapes import StepShape

MOST_ROWS_SCORED = 256  # of hidden states in one product: beyond, products do not depend on how many they are
EVERYTHING = msgspec.structs.replace(EVERY_KIND, min_tokens=2, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)


_GRAPH_BYTES = 4 << 20  # of one captured step, beside the memory that all of them share
_SPARE_BYTES = 256 << 20
_FRAGMENTS = 0.05  # of the peak


@dataclass(frozen=True)
class Needs:
    """Memory that a runner takes beside weights and blocks."""

    step_bytes: int  # at the peak of the largest step
    captured_bytes: int  # of the largest captured step
    num_captured: int

    @property
    def num_bytes(self) -> int:
        captured = self.captured_bytes + self.num_captured * _GRAPH_BYTES
        return int(self.step_bytes * (1 + _FRAGMENTS)) + captured + _SPARE_BYTES


class Rehearsal:
    """Every size of step once, in runners that are gone afterwards."""

    def __init__(
        self,
        make_runner: Callable[[], DeviceRunner],
        captured: Sequence[StepShape],
        peak_bytes: Callable[[Callable[[], object]], int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eager_decodes: Sequence[StepShape] = (),
    ) -> None:
        """`captured`: the sizes that will be, largest first; `eager_decodes`: those that kernels are chosen by where
        nothing is captured. `peak_bytes(work)` does work and says what it took.
        """
        self._make_runner = make_runner
        self._captured = captured
        self._eager_decodes = eager_decodes
        self._peak_bytes = peak_bytes
        self._limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }

    def run(self) -> Needs:
        """What the steps took at most. The largest come first: in them are the kernels that take longest to compile."""
        largest_captured = max((shape.num_tokens for shape in self._captured), default=0)
        eager = list(eager_shapes(**self._limits, largest_captured=largest_captured))
        step_bytes = max(
            self._peak_bytes(lambda: largest_step(self._make_runner(), **self._limits)),
            self._peak_bytes(lambda: idle_steps(self._make_runner(), eager[:1])),
        )
        captured_bytes = self._peak_bytes(lambda: idle_steps(self._make_runner(), self._captured[:1]))
        idle_steps(self._make_runner(), [*eager[1:], *self._captured[1:], *self._eager_decodes])
        scored_steps(self._make_runner(), **self._limits, up_to=max(largest_captured, MOST_ROWS_SCORED))
        return Needs(step_bytes, captured_bytes, len(self._captured))


@torch.inference_mode()
def exchanges(model: Layer, groups: ParallelGroups, dtype: torch.dtype) -> None:
    """What the ranks bring each other, in each way that a step of some size may take. All ranks do so."""
    groups.rehearse(dtype)
    for spread in spread_experts(model):
        spread.rehearse(dtype)


def eager_shapes(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, largest_captured: int
) -> Iterator[StepShape]:
    """Sizes that are not captured, the one that takes most first: from the largest on, each half of the one before.

    Each is one decode and one chunk. The largest comes with as many keys as kernels spell out, and again with more.
    """
    largest = max_num_batched_tokens
    if largest <= max(largest_captured, 2):
        return
    decodes = 1 if max_num_seqs > 1 else 0

    def chunk(tokens: int, num_kv_tokens: int | None) -> StepShape:
        longest = min(tokens, max_model_len)
        return StepShape(decodes + 1, tokens, decodes, longest, max_model_len, num_kv_tokens)

    yield chunk(largest, MAX_EXPANDED_TOKENS)
    yield chunk(largest, None)
    tokens = largest // 2
    while tokens > max(largest_captured, 2):
        yield chunk(tokens, tokens)
        tokens //= 2


@torch.inference_mode()
def idle_steps(runner: DeviceRunner, shapes: Sequence[StepShape]) -> None:
    """Runs a step of each size, of nothing but padding, in a runner that was never given a plan."""
    with runner.queue.current():
        for shape in shapes:
            runner.step(shape)
    runner.queue.synchronize()


def scored_steps(
    runner: DeviceRunner, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, up_to: int
) -> None:
    """Steps with a prompt whose tokens are all scored, which run eagerly at any size: by itself, and behind a decode.

    Kernels are chosen by powers of two of tokens.
    """
    largest = min(up_to, max_num_batched_tokens)
    freed: list[int] = []
    for tokens in [*(1 << bits for bits in range(2, largest.bit_length()) if 1 << bits < largest), largest]:
        for decodes in range(min(2, max_num_seqs)):
            lens = [*[1] * decodes, min(tokens - decodes, max_model_len - 1)]
            starts = [_start(row, length) for row, length in enumerate(lens)]
            chunks = [Chunk(row, 0, length, True, [], prompt_logprobs=length > 1) for row, length in enumerate(lens)]
            runner.launch(StepPlan(0, freed, starts, chunks)).result()
            freed = list(range(len(lens)))


def largest_step(runner: DeviceRunner, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
    """As many rows as there are, as many tokens as fit, and every row wants everything. All share block 0."""
    length = min(max_num_batched_tokens // max_num_seqs, max_model_len - 1)
    starts = [_start(row, length) for row in range(max_num_seqs)]
    chunks = [Chunk(row, 0, length, True, [], prompt_logprobs=row == 0) for row in range(max_num_seqs)]
    runner.launch(StepPlan(0, [], starts, chunks)).result()
    runner.launch(StepPlan(0, list(range(max_num_seqs)), [], [])).result()


def _start(row: int, length: int) -> RowStart:
    """A prompt that wants everything, all of it in block 0."""
    blocks = [0] * (-(-(length + 1) // BLOCK_SIZE))
    return RowStart(row, str(row), [0] * length, [], EVERYTHING, seed=0, stop_token_ids=[1], block_ids=blocks)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """What `work` holds at its peak beyond what it leaves behind: libraries keep what they took at their first call."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
