"""Prompts that ask for values out of lists, as token ids, and the share of right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from baton.cluster.recall import TOKENS_PER_ANSWER, make_questions
from baton.engine.core.messages import EngineRequest
from baton.engine.core.sampling import SamplingParams

HYBRID = Path(__file__).parents[2] / "configs/demo/hybrid"


@dataclass(frozen=True)
class Questions:
    requests: Sequence[EngineRequest]
    answers: Mapping[str, list[int]]  # by request

    @classmethod
    def of(cls, model: Path, lengths: Sequence[int], samples: int) -> Questions:
        """Make `samples` questions of every length; the same ones each time."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS_PER_ANSWER)
        requests, answers = [], {}
        for number, question in enumerate(make_questions(lengths, samples, seed=0)):
            name = f"question {number}"
            ids = tokenizer.encode(question.prompt).ids
            requests.append(EngineRequest(request_id=name, prompt_token_ids=ids, sampling=sampling, seed=0))
            answers[name] = tokenizer.encode(question.answer).ids
        return cls(requests, answers)

    def share_right(self, tokens: Mapping[str, Sequence[int]]) -> float:
        right = sum(list(tokens[name])[:TOKENS_PER_ANSWER] == answer for name, answer in self.answers.items())
        return right / len(self.answers)
