"""Steps that run before the engine is ready: they compile kernels, touch memory, and measure the largest step.

warm_up        a CPU: one prompt and one decode with every kind of sampling
ProfileRun     a GPU: every size of step; the peak of memory determines the number of KV blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from baton.kernels.mla import MAX_EXPANDED_TOKENS, MOST_TILED_TOKENS

from ..core.layout import BLOCK_SIZE
from ..core.sampling import MAX_LOGPROBS, SamplingParams
from ..core.step import Chunk, RowStart, StepPlan
from ..layers.base import Layer
from ..parallel.groups import ParallelGroups
from .expert_balance import spread_experts
from .runner import ModelRunner
from .shapes import StepLimits, StepShape

_PROMPT_LEN = 2 * BLOCK_SIZE  # more than one block, and long enough for the kernels that serve several query tokens
EVERY_KIND = SamplingParams(  # every kind of sampling in one request
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logprobs=2,
    logit_bias={0: 1.0},
    bad_words_token_ids=[[0, 1]],
    allowed_token_ids=[0],  # runs the kernels that masks of grammars run
)
EVERYTHING = msgspec.structs.replace(EVERY_KIND, min_tokens=2, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
MAX_SCORED_ROWS = 256  # rows of one product with the head: beyond that, the choice of kernels no longer changes

_GRAPH_BYTES = 4 << 20  # of one captured step, beside the memory that all of them share
_SPARE_BYTES = 256 << 20
_FRAGMENTATION = 0.05  # as a share of the peak


def warm_up(runner: ModelRunner) -> None:
    """Run a prompt and a decode step with every kind of sampling, in blocks without content."""
    limits, tensors = runner.limits, runner.arenas.tensors
    num_blocks = min(len(tensor) for tensor in tensors)
    room = min(limits.max_num_batched_tokens, limits.max_model_len - 2, num_blocks * BLOCK_SIZE - 1)
    prompt_len = max(1, min(_PROMPT_LEN, room))
    start = RowStart(
        row=0,
        request_id="warm-up",
        prompt_token_ids=[0] * prompt_len,
        output_token_ids=[],
        sampling=EVERY_KIND,
        seed=0,
        stop_token_ids=[],
        block_tables=[list(range(-(-(prompt_len + 1) // BLOCK_SIZE)))] * len(tensors),
    )
    prompt = Chunk(row=0, start=0, num_tokens=prompt_len, samples=True, new_block_ids=[])
    decode = Chunk(row=0, start=prompt_len, num_tokens=1, samples=True, new_block_ids=[])
    fits = prompt_len + 2 <= limits.max_model_len
    guesses = limits.max_guesses_on_device
    for plan in (
        StepPlan(step=0, freed_rows=[], started_rows=[start], chunks=[prompt], num_guesses=guesses),
        StepPlan(step=0, freed_rows=[], started_rows=[], chunks=[decode] if fits else []),
        StepPlan(step=0, freed_rows=[0], started_rows=[], chunks=[]),
    ):
        runner.launch(plan).result()


@dataclass(frozen=True)
class StepMemory:
    """The memory that a runner takes beside weights and blocks."""

    step_bytes: int  # at the peak of the largest step
    captured_bytes: int  # of the largest captured step
    num_captured: int

    @property
    def num_bytes(self) -> int:
        captured = self.captured_bytes + self.num_captured * _GRAPH_BYTES
        return int(self.step_bytes * (1 + _FRAGMENTATION)) + captured + _SPARE_BYTES


class ProfileRun:
    """Runs every size of step once, in runners that are discarded afterwards."""

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        captured: Sequence[StepShape],
        peak_bytes: Callable[[Callable[[], object]], int],
        limits: StepLimits,
        *,
        eager_decodes: Sequence[StepShape] = (),
    ) -> None:
        """`captured`: the sizes that will be captured, largest first. `eager_decodes`: if nothing is captured, the
        sizes of decodes, with drafts and without, by which kernels are chosen. `peak_bytes(work)` does the work and
        returns the memory that it took.
        """
        self._make_runner = make_runner
        self._captured = captured
        self._eager_decodes = eager_decodes
        self._peak_bytes = peak_bytes
        self._limits = limits

    def run(self) -> StepMemory:
        """Return the most memory that steps take. The largest run first: their kernels take longest to compile."""
        limits = self._limits
        largest_captured = max((shape.num_tokens for shape in self._captured), default=0)
        eager = list(eager_shapes(limits, largest_captured))
        step_bytes = max(
            self._peak_bytes(lambda: largest_step(self._make_runner())),
            self._peak_bytes(lambda: padding_steps(self._make_runner(), eager[:1])),
            self._peak_bytes(lambda: padding_steps(self._make_runner(), drafted_mix(limits, largest_captured))),
        )
        captured_bytes = self._peak_bytes(lambda: padding_steps(self._make_runner(), self._captured[:1]))
        padding_steps(self._make_runner(), [*eager[1:], *self._captured[1:], *self._eager_decodes])
        scored_steps(self._make_runner(), up_to=max(largest_captured, MAX_SCORED_ROWS))
        if limits.max_drafts:
            edited_drafts(self._make_runner())
        return StepMemory(step_bytes, captured_bytes, len(self._captured))


@torch.inference_mode()
def warm_up_collectives(model: Layer, groups: ParallelGroups, dtype: torch.dtype) -> None:
    """Launch every kernel of collectives that a step of any size may use. All ranks call it at the same time."""
    groups.warm_up(dtype)
    for spread in spread_experts(model):
        spread.warm_up(dtype)


def eager_shapes(limits: StepLimits, largest_captured: int) -> Iterator[StepShape]:
    """Yield sizes that are not captured: the largest, which takes most memory, then each half of the one before.

    Each is one decode and one chunk. The largest comes twice, with as many keys as kernels expand latents for and with
    more, and so do those for which kernels of absorbed latents are chosen by the number of tokens.
    """
    largest = limits.max_num_batched_tokens
    if largest <= max(largest_captured, 2):
        return
    decodes = 1 if limits.max_num_seqs > 1 else 0

    def chunk(tokens: int, num_kv_tokens: int | None) -> StepShape:
        return StepShape(
            num_seqs=decodes + 1,
            num_tokens=tokens,
            num_decodes=decodes,
            max_query_len=min(tokens, limits.max_model_len),
            max_seq_len=limits.max_model_len,
            num_kv_tokens=num_kv_tokens,
            num_wanted=decodes + 1,
        )

    yield chunk(largest, MAX_EXPANDED_TOKENS)
    yield chunk(largest, None)
    tokens = largest // 2
    while tokens > max(largest_captured, 2):
        yield chunk(tokens, tokens)
        if tokens <= MOST_TILED_TOKENS:
            yield chunk(tokens, None)
        tokens //= 2


def drafted_mix(limits: StepLimits, largest_captured: int) -> list[StepShape]:
    """Return the largest step of a prompt beside decodes with drafts, unless it is captured or there are no drafts.

    It uses the same kernels as other sizes that are run, so it is not needed for compilation.
    """
    largest = limits.max_num_batched_tokens
    if not limits.max_drafts or largest <= max(largest_captured, 2):
        return []
    num_draws = min(limits.max_num_draws, largest - 1)
    mix = StepShape(
        num_seqs=min(limits.max_num_seqs, num_draws),
        num_tokens=largest,
        num_decodes=0,
        max_query_len=min(largest, limits.max_model_len),
        max_seq_len=limits.max_model_len,
        num_wanted=num_draws,
        max_drafts=limits.max_drafts,
        num_draws=num_draws,
    )
    return [mix]


@torch.inference_mode()
def padding_steps(runner: ModelRunner, shapes: Sequence[StepShape]) -> None:
    """Run an eager step of nothing but padding for each shape, in a runner that has never had a plan."""
    with runner.backend.in_order():
        for shape in shapes:
            runner.step.run(shape)
            if guesses := runner.limits.max_guesses_on_device:
                runner.step.guess(shape, guesses)
    runner.backend.synchronize()


def scored_steps(runner: ModelRunner, up_to: int) -> None:
    """Run steps with a prompt whose tokens are all scored, alone and after a decode. Such steps are never captured.

    Sizes are powers of two, by which kernels are chosen, and the largest.
    """
    limits = runner.limits
    largest = min(up_to, limits.max_num_batched_tokens)
    freed: list[int] = []
    for tokens in [*(1 << bits for bits in range(2, largest.bit_length()) if 1 << bits < largest), largest]:
        for decodes in range(min(2, limits.max_num_seqs)):
            lens = [*[1] * decodes, min(tokens - decodes, limits.max_model_len - 1)]
            starts = [_start(row, length, len(runner.arenas.tensors)) for row, length in enumerate(lens)]
            chunks = [Chunk(row, 0, length, True, [], prompt_logprobs=length > 1) for row, length in enumerate(lens)]
            runner.launch(StepPlan(0, freed, starts, chunks)).result()
            freed = list(range(len(lens)))


def largest_step(runner: ModelRunner) -> None:
    """Run a step with all rows, as many tokens as fit, and every kind of sampling. All rows share block 0."""
    limits = runner.limits
    rows = range(limits.max_num_seqs)
    length = min(limits.max_num_batched_tokens // limits.max_num_seqs, limits.max_model_len - 1)
    starts = [_start(row, length, len(runner.arenas.tensors)) for row in rows]
    chunks = [Chunk(row, 0, length, True, [], prompt_logprobs=row == 0) for row in rows]
    guesses = limits.max_guesses_on_device
    runner.launch(StepPlan(0, [], starts, chunks, num_guesses=guesses)).result()
    runner.launch(StepPlan(0, list(rows), [], [])).result()


def edited_drafts(runner: ModelRunner) -> None:
    """Run a decode with a draft, and draw after both of its tokens from edited logits, as with a grammar."""
    start = _start(row=0, length=1, num_groups=len(runner.arenas.tensors))
    drafted = Chunk(0, 1, 2, True, [], num_drafts=1, drafts=(0,))
    runner.launch(StepPlan(0, [], [start], [Chunk(0, 0, 1, True, [])])).result()
    runner.launch(StepPlan(0, [], [], [drafted])).result()
    runner.launch(StepPlan(0, [0], [], [])).result()


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of `work` on a GPU, without what it keeps, as libraries never free some memory."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


def _start(row: int, length: int, num_groups: int) -> RowStart:
    """Return a prompt with every kind of sampling, all of it in block 0 of each cache group."""
    tables = [[0] * (-(-(length + 1) // BLOCK_SIZE))] * num_groups
    return RowStart(row, str(row), [0] * length, [], EVERYTHING, seed=0, stop_token_ids=[1], block_tables=tables)
