"""The contract between scheduler and runner: one plan in, one result out.

A request owns a *row* of the runner from the plan that brings it in (`RowStart`) to the plan that lists the row in
`freed_rows`. The row keeps everything about the request on the device: its tokens, block table, sampling state. After
`RowStart`, plans carry only differences. Tokens that a step samples are written into the row by the runner itself,
behind those that are known, so the next step can be planned before anyone has seen them.

Several tokens are sampled where a chunk ends in *drafts*, guesses of tokens that nobody has drawn yet: as many as were
guessed right, and one more. The row on the device knows how many that were before anyone else does; until the step is
settled, plans count all drafts as right. Guesses come with the plan, or the device makes them at the end of a step and
keeps them in the row.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from .logprobs import Logprobs
from .sampling import SamplingParams


class RowStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a row: for the first time, or again after preemption."""

    row: int
    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    stop_token_ids: list[int]  # all that end it; masked until `sampling.min_tokens` outputs exist
    block_tables: list[list[int]]  # of each cache group; entries given back are 0: what is read there has no weight
    num_computed: int = 0  # its first tokens whose KV is in its blocks already


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, start + num_tokens) of one row run through the model in this step.

    Where drafts of an earlier step are not settled, the row may begin up to so many tokens before `start`.
    """

    row: int
    start: int  # tokens of the row whose KV is already in its blocks
    num_tokens: int
    samples: bool  # the chunk reaches the row's last token, so a next token is drawn
    new_block_ids: list[list[int]]  # appended to the row's table in each cache group before the step runs; []: none
    prompt_logprobs: bool = (
        False  # compute logprobs of the tokens that follow each position of this chunk in the prompt
    )
    num_drafts: int = 0  # the last so many of its tokens are guesses
    # Guesses of the row's tokens, the last of them for index `start + num_drafts`; (): those that the row keeps.
    drafts: tuple[int, ...] = ()

    @property
    def first_guess(self) -> int:
        """The index in the row of the first of its `drafts`, where it brings any."""
        return self.start + self.num_drafts + 1 - len(self.drafts)

    @property
    def num_draws(self) -> int:
        """Tokens that are drawn: behind the last token, and behind the one before each draft."""
        return self.num_drafts + 1 if self.samples else 0

    @property
    def first_draw(self) -> int:
        """Tokens of the row that precede the first one drawn."""
        return self.start + self.num_tokens - self.num_drafts

    @property
    def num_wanted(self) -> int:
        """Tokens that go through all of the last layer, since something is drawn or scored behind them."""
        return self.num_tokens if self.prompt_logprobs else self.num_draws


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one draw of this step may give; draws without a mask give any token of the vocabulary."""

    row: int
    position: int  # tokens of the row that precede the drawn one; known, since nothing of such a row is unsettled
    words: bytes  # int32, little-endian: token t may be drawn where bit t % 32 of word t // 32 is set


class StepSize(msgspec.Struct, frozen=True, array_like=True):
    """The size of one data-parallel rank's part of a step that all ranks run together."""

    num_tokens: int
    num_seqs: int
    num_wanted: int  # tokens that go through all of the last layer: to sample, for logprobs of a prompt; at least one
    all_hidden: bool = False  # a chunk asks for logprobs of its prompt
    num_drafts: int = 0  # of all chunks
    max_drafts: int = 0  # of one chunk
    num_guesses: int = 0  # see `StepPlan`

    @property
    def num_draws(self) -> int:
        """Tokens behind which one may be drawn: the last of each chunk, and the one before each draft."""
        return self.num_seqs + self.num_drafts

    @property
    def only_decodes(self) -> bool:
        """True where no chunk is more than one token and its drafts."""
        return self.num_tokens == self.num_draws


PADDING = StepSize(1, 1, 1)  # what a rank runs that has nothing to do: one token that belongs to no request


class GroupStep(msgspec.Struct, frozen=True, array_like=True):
    """The agreement of data-parallel ranks about a step of all of them (see `lockstep`)."""

    sizes: list[StepSize]  # of each rank
    reviews_experts: bool = False  # before the step, the loads of experts are added up, and experts may move

    @property
    def num_guesses(self) -> int:
        """The guesses that every rank makes, an idle one too: a draft layer's experts are on all of them."""
        return max(size.num_guesses for size in self.sizes)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Apply `freed_rows`, then `started_rows`, then run `chunks`.

    Those of one token come first, the *decodes*: all KV before their token is of earlier steps, and may be read while
    this step still writes its own. Those with drafts follow. The others may read what another chunk of the same step
    writes.

    Without chunks, but with a `group`, it is an *empty step*: its rank has nothing to do and runs `PADDING`, so that
    its experts serve the tokens of the others.
    """

    step: int
    freed_rows: list[int]
    started_rows: list[RowStart]
    chunks: list[Chunk]
    group: GroupStep | None = None  # None: this rank runs by itself
    masks: list[TokenMask] = []  # of all draws of rows with a grammar
    num_guesses: int = 0  # that the device makes of the tokens behind the last draw of each chunk that samples

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


NO_TOKEN = -1  # what a row draws that has none to draw


class ChunkResult(msgspec.Struct, frozen=True, array_like=True):
    """The result of one chunk; results are in the order of `StepPlan.chunks`."""

    token_ids: list[int]  # drawn, or `NO_TOKEN`: one more than drafts were accepted; none where the chunk samples none
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
