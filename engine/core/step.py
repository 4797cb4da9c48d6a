"""The contract between scheduler and runner: one plan in, one result out.

A request owns a *row* of the runner, from the plan that assigns it (`RowStart`) to the plan that lists it in
`freed_rows`. The row keeps everything about the request on the device: its tokens, block table, sampling state. After
`RowStart`, plans carry only differences. The runner itself writes each sampled token into the row, behind the known
ones, so the next step can be planned before the token reaches the host.

A chunk may end in *drafts*: guesses of tokens that have not been drawn yet. Then it draws one token more than leading
drafts are right. The row on the device knows that number before the host does. Until the step is settled, plans count
all drafts as right. Guesses come with the plan, or the device makes them at the end of a step and keeps them in the
row.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from .logprobs import Logprobs
from .sampling import SamplingParams


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """The start of a request in a row: for the first time, or again after preemption."""

    row: int
    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    stop_token_ids: list[int]  # all that end the request; masked until `sampling.min_tokens` outputs exist
    block_tables: list[list[int]]  # one for each cache group; entries given back are 0: reads there have no weight
    num_computed: int = 0  # leading tokens whose KV is already in its blocks


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + num_tokens) of one row, which run through the model in this step.

    While drafts of earlier steps are unsettled, the row may begin before `start`, by up to their number.
    """

    row: int
    start: int  # tokens of the row whose KV is already in its blocks
    num_tokens: int
    samples: bool  # the chunk reaches the row's last token, so a next token is drawn
    new_block_ids: list[list[int]]  # to append to the row's table in each cache group before the step runs; []: none
    prompt_logprobs: bool = False  # compute logprobs of the prompt tokens that follow each position of this chunk
    num_drafts: int = 0  # how many of its last tokens are drafts
    # Guesses of the row's tokens, the last one for index `start + num_drafts`; (): the row has them on the device.
    drafts: tuple[int, ...] = ()

    @property
    def first_guess(self) -> int:
        """The index in the row of the first of its `drafts`, if the plan brings any."""
        return self.start + self.num_drafts + 1 - len(self.drafts)

    @property
    def num_draws(self) -> int:
        """The number of tokens that it draws: after its last token, and in the place of each draft."""
        return self.num_drafts + 1 if self.samples else 0

    @property
    def first_draw(self) -> int:
        """The number of tokens of the row before the first one drawn."""
        return self.start + self.num_tokens - self.num_drafts

    @property
    def num_wanted(self) -> int:
        """Tokens that go through the whole last layer, because a token after them is drawn or scored."""
        return self.num_tokens if self.prompt_logprobs else self.num_draws


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one draw of this step may give. A draw without a mask may give any token of the vocabulary."""

    row: int
    position: int  # tokens of the row before the drawn one; it is known, since such a row has nothing unsettled
    words: bytes  # int32, little-endian: token t may be drawn if bit t % 32 of word t // 32 is set


class StepSize(msgspec.Struct, frozen=True, array_like=True):
    """The size of one data-parallel rank's part of a step that all ranks run together."""

    num_tokens: int
    num_seqs: int
    num_wanted: int  # tokens that go through the whole last layer: to sample, or for prompt logprobs; at least one
    all_hidden: bool = False  # a chunk asks for prompt logprobs
    num_drafts: int = 0  # of all chunks together
    max_drafts: int = 0  # the most of any chunk
    num_guesses: int = 0  # see `StepPlan`

    @property
    def num_draws(self) -> int:
        """The most tokens that may be drawn: one after each chunk, and one in the place of each draft."""
        return self.num_seqs + self.num_drafts

    @property
    def only_decodes(self) -> bool:
        """True if every chunk is a single token with its drafts."""
        return self.num_tokens == self.num_draws


PADDING = StepSize(1, 1, 1)  # the step of a rank that has nothing to do: one token that belongs to no request


class GroupStep(msgspec.Struct, frozen=True, array_like=True):
    """The agreement of data-parallel ranks on a step that all of them run (see `lockstep`)."""

    sizes: list[StepSize]  # of each rank
    reviews_experts: bool = False  # before the step, ranks add up the loads of experts, and experts may move

    @property
    def num_guesses(self) -> int:
        """The guesses that every rank makes, also an idle one: all of them hold experts of a draft layer."""
        return max(size.num_guesses for size in self.sizes)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Apply `freed_rows`, then `started_rows`, then run `chunks`.

    Chunks of one token come first, the *decodes*. They read only KV of earlier steps and their own, so they may run
    while this step still writes that of other chunks. Decodes with drafts follow. All other chunks may read KV that
    another chunk of the same step writes.

    A plan without chunks but with a `group` is an *empty step*: its rank has nothing to do and runs `PADDING`, so that
    its experts serve the tokens of the others.
    """

    step: int
    freed_rows: list[int]
    started_rows: list[RowStart]
    chunks: list[Chunk]
    group: GroupStep | None = None  # None: this rank runs by itself
    masks: list[TokenMask] = []  # for all draws of rows with a grammar
    num_guesses: int = 0  # how many tokens the device guesses after the last draw of each chunk that samples
    # From this chunk on, a draft model reads all tokens of their rows that it has not read yet. None: those of prompts
    # alone; with guesses, those of all chunks.
    reads_from: int | None = None

    @property
    def reads_late(self) -> bool:
        """True if a draft model reads tokens of earlier steps, and makes no guesses."""
        return self.reads_from is not None and not self.num_guesses

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def size(self) -> StepSize:
        """The size of all chunks together."""
        wanted = sum(chunk.num_wanted for chunk in self.chunks)
        return StepSize(
            num_tokens=self.num_tokens,
            num_seqs=len(self.chunks),
            num_wanted=max(1, wanted),
            all_hidden=any(chunk.prompt_logprobs for chunk in self.chunks),
            num_drafts=sum(chunk.num_drafts for chunk in self.chunks),
            max_drafts=max((chunk.num_drafts for chunk in self.chunks), default=0),
            num_guesses=self.num_guesses,
        )


NO_TOKEN = -1  # the draw of a row for which no token can be drawn


class ChunkResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one chunk. Results are in the order of `StepPlan.chunks`."""

    token_ids: list[int]  # tokens drawn, one more than drafts were accepted, or `NO_TOKEN`; empty if it does not sample
    logprobs: Logprobs | None = None  # of the drawn tokens
    prompt_logprobs: Logprobs | None = None  # of prompt tokens start + 1 ... start + num_tokens (within the prompt)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    step: int
    chunks: list[ChunkResult]


class PendingStep(Protocol):
    """A step that has been launched on the device."""

    def result(self) -> StepResult:
        """Wait for the step, and return its result. Raises the step's error."""
        ...


class Runner(Protocol):
    """Runs the model. `launch` returns when the work is queued on the device; steps finish in launch order."""

    def launch(self, plan: StepPlan) -> PendingStep: ...
