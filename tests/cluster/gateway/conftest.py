"""A gateway over real engine cores on a fake model, spoken to through ASGI or, for streams, over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from fake_cluster import FakeCluster
from gateway_service import Service
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.cluster.contracts import Role
from baton.cluster.gateway import GatewaySettings, ServedModel, create_app
from baton.engine.text import ChatTemplate, Tokenizer

MAX_MODEL_LEN = 256
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ hint if hint is defined else '' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps",
    "a relay team passes the baton from one runner to the next runner",
    "hello world, hello there, what is the name of the fox?",
]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, ChatTemplate({"default": TEMPLATE}))


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        model_id="tiny",
        tokenizer=tokenizer,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(tokenizer.eos_token_id,),
    )


@pytest.fixture
async def start(model: ServedModel, tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Service]]:
    """`start(Role.PREFILL, Role.DECODE, api_keys=[...])`: a gateway with these engines and settings."""
    services: list[Service] = []

    def start_service(*roles: Role, served: ServedModel = model, **settings: Any) -> Service:
        cluster = FakeCluster(
            {},
            num_blocks=64,
            max_num_seqs=32,
            max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=model.vocab_size,
            eos_token_ids=list(model.eos_token_ids),
        )
        for role in roles:
            cluster.start(role)
        limits = {"capacity_timeout_s": 5.0, "request_timeout_s": 20.0, **settings}
        service = Service(cluster, create_app(cluster, served, GatewaySettings(**limits)), tokenizer)
        services.append(service)
        return service

    yield start_service
    for service in services:
        await service.http.aclose()
        await service.cluster.close()


@pytest.fixture(params=["unified", "disaggregated"])
async def service(start: Callable[..., Service], request: pytest.FixtureRequest) -> Service:
    """Whatever is true of a gateway is true with one engine and with two."""
    roles = [Role.UNIFIED] if request.param == "unified" else [Role.PREFILL, Role.DECODE]
    return start(*roles)


@pytest.fixture
async def disaggregated(start: Callable[..., Service]) -> Service:
    return start(Role.PREFILL, Role.DECODE)
