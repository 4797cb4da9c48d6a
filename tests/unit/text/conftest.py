from __future__ import annotations

import pytest

from baton.engine.text import Tokenizer

from .small_tokenizers import BACKENDS, NAMED


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(build(), NAMED) for name, build in BACKENDS.items()}


@pytest.fixture(scope="session")
def byte_level(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte level"]


@pytest.fixture(scope="session")
def sentence_piece(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["sentence piece"]
