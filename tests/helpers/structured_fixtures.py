"""A tiny Qwen3 with random weights; its tokens are single bytes, parts of characters, and several characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.engine import LLM
from baton.engine.structured import GrammarVocabulary, XGrammarBackend

from .checkpoints import write_checkpoint
from .structured_cases import CHOICES, SCHEMA

VOCAB_SIZE = 400  # the tokenizer has fewer: the output layer is padded
SPECIAL = ["<|end|>", "<|pad|>"]
CORPUS = [
    json.dumps(SCHEMA),
    *CHOICES,
    '{"name": "é", "age": 12, "tags": ["red"]}, "green"]}',
    "the quick brown fox",
    "{} {} {}",
]


@pytest.fixture(scope="session")
def structured_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the checkpoint. Token 0 ends an output; the weights are biased towards short answers."""
    folder = write_checkpoint(
        tmp_path_factory.mktemp("structured") / "qwen3", "qwen3", vocab_size=VOCAB_SIZE, eos_token_id=0
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


@pytest.fixture(scope="session")
def vocabulary(structured_checkpoint: Path) -> GrammarVocabulary:
    return GrammarVocabulary(str(structured_checkpoint), VOCAB_SIZE, [0])


@pytest.fixture(scope="session")
def grammars(vocabulary: GrammarVocabulary) -> Iterator[XGrammarBackend]:
    source = XGrammarBackend(vocabulary)
    yield source
    source.close()


@pytest.fixture(scope="session")
def make_structured_llm(structured_checkpoint: Path) -> Callable[..., LLM]:
    def make(**engine_args: Any) -> LLM:
        small = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256}
        return LLM(str(structured_checkpoint), **{**small, **engine_args})

    return make


@pytest.fixture(scope="session")
def structured_llm(make_structured_llm: Callable[..., LLM]) -> Iterator[LLM]:
    with make_structured_llm() as llm:
        yield llm
