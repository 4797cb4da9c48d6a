"""The time that drafts save, by the share of them that are right: `baton bench drafts`.

Checkpoints without weights, and random prompts, leave nothing to guess from. So the drafter is given the answers, from
a run without drafts, and errs in a given share of its guesses. Answers are drawn at a temperature at which they depend
only on the seeds. Otherwise, on a GPU, they could differ from the known ones, because sums are rounded differently in
steps with drafts.

The engine's own drafter is measured as it is. A drafter on the device draws with the same random numbers, so at that
temperature it is nearly always right, whatever its weights: only its time counts.

In an edit trace, a client sends a text that it expects back with changes. `suffix` is given the known answer as its
prediction, with one token in every `edit_every` edited: in turn replaced, left out, or added. Answers are drawn at a
lower temperature, at which the model writes its usual kind of text.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
EDIT_TEMPERATURE = 0.8
NUM_RUNS = 3  # for each figure; the shortest counts


class InformedDrafter:
    """Guesses the tokens of a request from its known answer. Implements `Drafter`.

    Each guess is right with a given probability; the same guesses are right in every run.
    """

    def __init__(
        self,
        answer_to: Callable[[str, Sequence[int]], Sequence[int]],
        acceptance: float,
        vocab_size: int,
        *,
        may_differ: bool = False,
    ) -> None:
        """`answer_to` takes a request's id and prompt, and returns all tokens of prompt and answer.

        It is an error if a request draws other tokens than the known ones, unless it `may_differ`, as on a GPU: then
        the rest of it is not guessed.
        """
        self._answer_to = answer_to
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._may_differ = may_differ
        self._num_known: dict[str, int] = {}  # tokens of each request so far
        self._whole: dict[str, Sequence[int]] = {}  # prompt and answer of each request; empty: no more is known of it

    @property
    def num_requests(self) -> int:
        """The number of requests that have started and not ended."""
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
        """Learn nothing, since all answers are known."""
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
    edit_every: int | None = None,
    engine_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return tokens per second of decoding, without drafts and with up to `num_drafts`, for each batch.

    `acceptance` is the share of right guesses. Prompts are cached, so their prefill is not part of the time.
    `baseline_throughput` is that of an engine without speculation, `spec_decode_acceptance_length` the tokens drawn in
    a step with drafts, and `spec_decode_num_drafts` how often a request had any in a step. If `engine_args` have a
    `speculative_config`, that is measured instead, and `num_drafts` and `acceptance` have no effect.

    With `edit_every`, predictions are the known answers with one edit in every `edit_every` tokens. The engine's
    drafter is then `suffix`, unless `engine_args` have another that uses predictions. Throughputs ending in
    `_per_cpu_second` count only the CPU time of this process; `equal_answers` is the share of answers with the same
    tokens with and without drafts.
    """
    args = dict(engine_args or {})
    own = args.pop("speculative_config", None)
    known: dict[tuple[int, ...], list[int]] = {}
    temperature = TEMPERATURE if edit_every is None else EDIT_TEMPERATURE

    def whole(_: str, prompt: Sequence[int]) -> list[int]:
        return [*prompt, *known.get(tuple(prompt), ())]

    baseline = _without_drafts(model, args, batches, temperature)
    gc.collect()  # its blocks may have all of a GPU's memory
    for each in baseline:
        known.update(each.answers)
    method = {"method": "suffix", "num_speculative_tokens": num_drafts}
    if edit_every is not None:
        method["suffix_decoding_max_cached_requests"] = 0  # a repeated answer would be found among recent ones
    config = own or method
    results = []
    with engine_for(model, {**args, "speculative_config": config}) as llm:
        vocab_size = llm.engine.model_config.vocab_size
        if own is None and edit_every is None:
            llm.engine.core.draft_with(InformedDrafter(whole, acceptance, vocab_size, may_differ=True))
        for batch, without in zip(batches, baseline, strict=True):
            predictions = None
            if edit_every is not None:
                predictions = {prompt: edited(known[prompt], edit_every, vocab_size) for prompt in without.answers}
            before = _checked(llm)
            measured = _decode(llm, batch, temperature, predictions)
            result = _figures(batch, without, measured) | _of_drafts(before, _checked(llm))
            if edit_every is not None:
                result |= _figures_of_edits(without, measured)
            results.append(result)
    chosen: dict[str, Any] = {"speculative_config": own}
    if own is None:
        chosen = {"num_drafts": num_drafts} | ({"acceptance": acceptance} if edit_every is None else {})
    if edit_every is not None:
        chosen["edit_every"] = edit_every
    return {**chosen, "batches": results}


def _without_drafts(
    model: str, args: Mapping[str, Any], batches: Sequence[RandomBatch], temperature: float
) -> list[_Decoded]:
    with engine_for(model, args) as llm:
        return [_decode(llm, batch, temperature) for batch in batches]


def edited(answer: Sequence[int], every: int, vocab_size: int) -> list[int]:
    """Return the answer with one edit in every `every` tokens: in turn a token is replaced, left out, or added."""
    rng, text = Random(every), list(answer)
    starts = range(0, len(answer) - every + 1, every)
    for number, start in reversed(list(enumerate(starts))):
        place, other = start + rng.randrange(every), rng.randrange(vocab_size)
        text[place : place + (number % 3 < 2)] = [] if number % 3 == 1 else [other]
    return text


def _figures(batch: RandomBatch, without: _Decoded, measured: _Decoded) -> dict[str, Any]:
    return {
        "batch_size": batch.num_prompts,
        "input_len": batch.input_len,
        "output_len": batch.output_len,
        "baseline_throughput": without.throughput,
        "output_throughput": measured.throughput,
        "speedup": measured.throughput / without.throughput,
    }


def _of_drafts(before: SpeculationStats, after: SpeculationStats) -> dict[str, float]:
    """Return how often a request had drafts in a step, and the tokens drawn then, from statistics before and after."""
    num_steps = after.num_drafts - before.num_drafts
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    length = 1 + num_accepted / num_steps if num_steps else 1.0
    return {"spec_decode_num_drafts": num_steps, "spec_decode_acceptance_length": length}


def _figures_of_edits(without: _Decoded, measured: _Decoded) -> dict[str, float]:
    num_equal = sum(measured.answers[prompt] == answer for prompt, answer in without.answers.items())
    return {
        "baseline_throughput_per_cpu_second": without.per_cpu_second,
        "output_throughput_per_cpu_second": measured.per_cpu_second,
        "speedup_per_cpu_second": measured.per_cpu_second / without.per_cpu_second,
        "equal_answers": num_equal / len(without.answers),
    }


def _checked(llm: LLM) -> SpeculationStats:
    return llm.engine.core.stats().speculation or SpeculationStats()


@dataclass(frozen=True)
class _Decoded:
    """The decodes of a batch: tokens per second, tokens per second of this process's CPU time, answers by prompt."""

    throughput: float
    per_cpu_second: float
    answers: dict[tuple[int, ...], list[int]]


def _decode(
    llm: LLM,
    batch: RandomBatch,
    temperature: float,
    predictions: Mapping[tuple[int, ...], Sequence[int]] | None = None,
) -> _Decoded:
    """Measure a batch's decodes. `predictions`: the expected answers, by prompt."""
    prompts = random_prompts(llm, batch)
    params = [
        SamplingParams(
            temperature=temperature, seed=index, ignore_eos=True, max_tokens=batch.output_len, detokenize=False
        )
        for index in range(batch.num_prompts)
    ]
    given: list[Any] = [
        prompt if predictions is None else {"prompt_token_ids": prompt, "prediction": list(predictions[tuple(prompt)])}
        for prompt in prompts
    ]
    first = [msgspec.structs.replace(param, max_tokens=1) for param in params]
    spans, cpu_spans = [], []
    for each in (first, params):
        best = best_cpu = float("inf")
        for _ in range(NUM_RUNS):
            start, start_cpu = time.perf_counter(), time.process_time()
            outputs = llm.generate(given, each, use_tqdm=False)
            best = min(best, time.perf_counter() - start)
            best_cpu = min(best_cpu, time.process_time() - start_cpu)
        spans.append(best)
        cpu_spans.append(best_cpu)
    num_tokens = batch.num_prompts * (batch.output_len - 1)
    answers = {
        tuple(prompt): list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)
    }
    return _Decoded(num_tokens / (spans[1] - spans[0]), num_tokens / (cpu_spans[1] - cpu_spans[0]), answers)
