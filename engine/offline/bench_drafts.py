"""The time that drafts save, by how many of them are right: `baton bench drafts`.

Checkpoints without weights, and random prompts, leave nothing to guess from. So the drafter knows the answers, from a
run without drafts, and errs in a given share of its guesses. Answers are drawn at a temperature at which they follow
from the seeds alone: on a GPU, sums of steps with drafts are rounded otherwise, and answers that hang by a last bit
would part from the known ones.

A drafter of the engine's own is measured as it is. What guesses on the device draws with the same random numbers, so at
that temperature it is nearly always right, whatever its weights: its time is what counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from ..core.sampling import SamplingParams
from ..core.speculation.drafter import DraftedRequest
from ..core.speculation.stats import SpeculationStats
from .bench import RandomBatch, engine_for, random_prompts

if TYPE_CHECKING:
    from .llm import LLM

TEMPERATURE = 20.0
NUM_RUNS = 3  # of each figure, of which the shortest counts


class InformedDrafter:
    """Guesses what a request will draw, from its known answer. Implements `Drafter`.

    Each guess is right by chance with a given probability, always the same ones.
    """

    def __init__(
        self,
        answer_to: Callable[[str, Sequence[int]], Sequence[int]],
        acceptance: float,
        vocab_size: int,
        *,
        may_differ: bool = False,
    ) -> None:
        """`answer_to` takes a request's id and prompt, and returns all tokens of its prompt and answer.

        A request that draws others than the known tokens is an error, unless it `may_differ`, as on a GPU: then its
        rest is not guessed.
        """
        self._answer_to = answer_to
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._may_differ = may_differ
        self._num_known: dict[str, int] = {}  # tokens of requests
        self._whole: dict[str, Sequence[int]] = {}  # prompts and answers of requests; those of which no more is known

    @property
    def num_requests(self) -> int:
        """The number of requests that have started and are not over."""
        return len(self._whole)

    def start(self, request: DraftedRequest) -> None:
        request_id, prompt = request.request_id, request.prompt_token_ids
        assert request_id not in self._whole
        self._num_known[request_id] = len(prompt)
        self._whole[request_id] = self._answer_to(request_id, prompt)
        self.extend(request_id, request.output_token_ids)

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        known, whole = self._num_known[request_id], self._whole[request_id]
        if [*token_ids] != [*whole[known : known + len(token_ids)]]:
            assert self._may_differ, "the drafter was told something else than was drawn"
            self._whole[request_id] = ()
        self._num_known[request_id] += len(token_ids)

    def propose(self, request_id: str, most: int) -> list[int]:
        first, whole = self._num_known[request_id], self._whole[request_id]
        return [self._guess(request_id, index, whole[index]) for index in range(first, min(first + most, len(whole)))]

    def learn(self, answer: Sequence[int], cache_salt: str) -> None:
        """Answers are known already."""
        assert answer

    def end(self, request_id: str) -> None:
        del self._num_known[request_id], self._whole[request_id]

    def _guess(self, request_id: str, index: int, right: int) -> int:
        is_right = Random(f"{request_id}/{index}").random() < self._acceptance
        return right if is_right else (right + 1) % self._vocab_size


def drafts(
    model: str,
    batches: Sequence[RandomBatch],
    *,
    num_drafts: int,
    acceptance: float,
    engine_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return tokens per second of decoding without drafts and with up to `num_drafts`, by batch.

    `acceptance` is the share of right guesses. Prompts are cached and not part of the time. `baseline_throughput` is of
    an engine without speculation, `spec_decode_acceptance_length` the tokens of a step with drafts. With a
    `speculative_config` in `engine_args`, that is measured, and both numbers say nothing.
    """
    args = dict(engine_args or {})
    own = args.pop("speculative_config", None)
    known: dict[tuple[int, ...], list[int]] = {}

    def whole(_: str, prompt: Sequence[int]) -> list[int]:
        return [*prompt, *known.get(tuple(prompt), ())]

    with engine_for(model, args) as llm:
        baseline = [_decode(llm, batch, known) for batch in batches]
    config = own or {"method": "suffix", "num_speculative_tokens": num_drafts}
    results = []
    with engine_for(model, {**args, "speculative_config": config}) as llm:
        vocab_size = llm.engine.model_config.vocab_size
        if own is None:
            llm.engine.core.draft_with(InformedDrafter(whole, acceptance, vocab_size, may_differ=True))
        for batch, without in zip(batches, baseline, strict=True):
            before = _checked(llm)
            speed = _decode(llm, batch)
            after = _checked(llm)
            num_steps = after.num_drafts - before.num_drafts
            num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
            results.append(
                {
                    "batch_size": batch.num_prompts,
                    "input_len": batch.input_len,
                    "output_len": batch.output_len,
                    "baseline_throughput": without,
                    "output_throughput": speed,
                    "speedup": speed / without,
                    "spec_decode_acceptance_length": 1 + num_accepted / num_steps if num_steps else 1.0,
                }
            )
    chosen = {"num_drafts": num_drafts, "acceptance": acceptance} if own is None else {"speculative_config": own}
    return {**chosen, "batches": results}


def _checked(llm: LLM) -> SpeculationStats:
    return llm.engine.core.stats().speculation or SpeculationStats()


def _decode(llm: LLM, batch: RandomBatch, known: dict[tuple[int, ...], list[int]] | None = None) -> float:
    """Return the tokens per second of a batch's decodes; let its answers be `known` by prompt."""
    prompts = random_prompts(llm, batch)
    params = [
        SamplingParams(
            temperature=TEMPERATURE, seed=index, ignore_eos=True, max_tokens=batch.output_len, detokenize=False
        )
        for index in range(batch.num_prompts)
    ]
    first = [msgspec.structs.replace(param, max_tokens=1) for param in params]
    spans = []
    for each in (first, params):
        best = float("inf")
        for _ in range(NUM_RUNS):
            start = time.perf_counter()
            outputs = llm.generate(prompts, each, use_tqdm=False)
            best = min(best, time.perf_counter() - start)
        spans.append(best)
    if known is not None:
        known.update(
            (tuple(prompt), output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)
        )
    return batch.num_prompts * (batch.output_len - 1) / (spans[1] - spans[0])
