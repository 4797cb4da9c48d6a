"""One prompt and one decode step before anyone waits for them, so that nothing is compiled or first touched later."""

from __future__ import annotations

from ..core.layout import BLOCK_SIZE
from ..core.sampling import SamplingParams
from ..core.step import Chunk, RowStart, Runner, StepPlan

_PROMPT_LEN = 2 * BLOCK_SIZE  # more than one block, and long enough for the kernels that serve several query tokens
EVERY_KIND = SamplingParams(  # of sampling, in one request
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
    allowed_token_ids=[0],  # as the masks of grammars
)


def warm_up(runner: Runner, *, num_blocks: int, max_model_len: int) -> None:
    """Runs a prompt and a decode step with every kind of sampling. The blocks that it writes hold nothing yet."""
    prompt_len = max(1, min(_PROMPT_LEN, max_model_len - 2, num_blocks * BLOCK_SIZE - 1))
    start = RowStart(
        row=0,
        request_id="warm-up",
        prompt_token_ids=[0] * prompt_len,
        output_token_ids=[],
        sampling=EVERY_KIND,
        seed=0,
        stop_token_ids=[],
        block_ids=list(range(-(-(prompt_len + 1) // BLOCK_SIZE))),
    )
    prompt = Chunk(row=0, start=0, num_tokens=prompt_len, samples=True, new_block_ids=[])
    decode = Chunk(row=0, start=prompt_len, num_tokens=1, samples=True, new_block_ids=[])
    fits = prompt_len + 2 <= max_model_len
    for plan in (
        StepPlan(step=0, freed_rows=[], started_rows=[start], chunks=[prompt]),
        StepPlan(step=0, freed_rows=[], started_rows=[], chunks=[decode] if fits else []),
        StepPlan(step=0, freed_rows=[0], started_rows=[], chunks=[]),
    ):
        runner.launch(plan).result()
