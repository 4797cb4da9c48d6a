"""A tiny Qwen3 with random weights, a tokenizer of single bytes, and engines of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.engine import LLM

from ...helpers.checkpoints import write_checkpoint

CHAT_TEMPLATE = (
    "{% if mood %}({{ mood }}) {% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Qwen3: 3 layers, 256 tokens (the bytes), 256 positions, float32; token 2 ends a sequence."""
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def make_llm(checkpoint: Path) -> Callable[..., LLM]:
    """Return a function that makes an `LLM` of the tiny checkpoint; its arguments override the small defaults."""

    def make(**engine_args: Any) -> LLM:
        small = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256}
        return LLM(str(checkpoint), **{**small, **engine_args})

    return make


@pytest.fixture(scope="session")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    """Make the reference `LLM`: whole prompts, no prefix cache, blocks for all, one step at a time, no text."""
    return make_llm(enable_prefix_caching=False)


@pytest.fixture(scope="session")
def text_llm(make_llm: Callable[..., LLM]) -> LLM:
    """Make an `LLM` that reads and writes text."""
    return make_llm(skip_tokenizer_init=False)
