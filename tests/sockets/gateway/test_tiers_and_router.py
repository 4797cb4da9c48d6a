"""Real engines with tiers, and a gateway that knows the contents of the tiers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from baton.cluster.cached_blocks import FoundPrefix
from baton.cluster.contracts import EngineView
from baton.cluster.engine_client import ZmqEngineClient
from baton.cluster.engines.server import EngineServer
from baton.cluster.gateway.app import create_app
from baton.cluster.gateway.routing.rates import CostRates, LearntRates
from baton.cluster.gateway.routing.router import Router
from baton.cluster.gateway.settings import GatewaySettings
from baton.engine.config import EngineConfig
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest
from baton.engine.core.regions import CacheRegion
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.tiers import TierStats
from baton.engine.net.curve import ClusterKey
from baton.engine.startup.build import build_engine
from baton.kv_transfer.settings import LocalEngine, TierSettings
from baton.kv_transfer.tiers.store import TierStore

from ...helpers.checkpoints import write_checkpoint
from ...helpers.fakes import ListedSource, make_record
from ...helpers.gateway_service import until
from ...helpers.tiny_model import MAX_MODEL_LEN, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(60)

KEY = ClusterKey.generate()
MODEL = tiny_model(tiny_tokenizer())
NUM_BLOCKS = 24
PROMPT_BLOCKS = 12
TIERS = TierSettings(host_bytes=8 << 20, min_tokens=64)


def prompt(stem: int) -> list[int]:
    """Return a prompt that shares nothing with those of other stems, and whose last token is in no full block."""
    return [stem + 3, *((stem + 5) * position % 250 + 5 for position in range(PROMPT_BLOCKS * BLOCK_SIZE))]


class TieredEngine:
    """An engine with few blocks and a tier in host memory."""

    def __init__(self, rank: int, model: Path) -> None:
        config = EngineConfig.from_args(
            {
                "model": str(model),
                "device": "cpu",
                "dtype": "float32",
                "num_threads": 1,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 2,
                "num_gpu_blocks_override": NUM_BLOCKS,
            }
        )
        self.engine = build_engine(config, open_tiers=lambda region: self._open(region, rank))
        name = f"engine-{rank}"
        self.server = EngineServer(self.engine.core, LocalEngine(name, 1, "127.0.0.1", KEY))
        self.record = msgspec.structs.replace(
            make_record(address=self.server.address, rank=rank),
            max_model_len=MAX_MODEL_LEN,
            num_blocks=NUM_BLOCKS,
            num_tier_blocks=self.tiers.num_slots,
        )
        self.server.start()

    def _open(self, region: CacheRegion, rank: int) -> TierStore:
        self.tiers = TierStore(region, TIERS, name=f"of-{rank}", cpu_affinity="any", wake=lambda: self.server.wake())
        return self.tiers

    def close(self) -> None:
        self.server.close()
        self.tiers.close()
        self.engine.close()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TieredEngine]]:
    folder = tmp_path_factory.mktemp("model")
    model = write_checkpoint(folder, "qwen3", num_hidden_layers=2, vocab_size=MODEL.vocab_size)
    engines = [TieredEngine(rank, model) for rank in range(2)]
    yield engines
    for engine in engines:
        engine.close()


class Gateway:
    def __init__(self, client: ZmqEngineClient, http: httpx.AsyncClient) -> None:
        self.client, self._http = client, http

    def view(self, rank: int) -> EngineView:
        return self.client.engines()[rank]

    def tiers(self, rank: int) -> TierStats:
        stats = self.view(rank).stats
        assert stats is not None
        assert stats.tiers is not None
        return stats.tiers

    async def complete(self, tokens: list[int], rank: int | None = None) -> str:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {} if rank is None else {"X-data-parallel-rank": f"{rank}"}
        response = await self._http.post("/v1/completions", json=body, headers=headers)
        return response.raise_for_status().json()["choices"][0]["text"]


@pytest.fixture
async def gateway(engines: list[TieredEngine]) -> AsyncIterator[Gateway]:
    source = ListedSource()
    source.show(*(engine.record for engine in engines))
    client = ZmqEngineClient(source, KEY, "gateway")
    await client.start()
    app = create_app(client, MODEL, GatewaySettings(gateway_id="gateway"))
    try:
        await until(lambda: len(client.engines()) == len(engines))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g", timeout=20) as http:
            yield Gateway(client, http)
    finally:
        await client.close()


def asked(tokens: list[int], request_id: str = "r") -> EngineRequest:
    return EngineRequest(request_id=request_id, prompt_token_ids=tokens, sampling=SamplingParams())


def a_router() -> Router:
    return Router(
        "g", rates=LearntRates(CostRates(), time.monotonic), session_patience_s=0.0, local_prefill_max_tokens=8192
    )


def ranks_chosen(gateway: Gateway, tokens: list[int]) -> set[int]:
    """Return the ranks that a router chooses for twenty requests with this prompt."""
    router, engines = a_router(), gateway.client.engines()
    routes = [router.route(engines, router.query(asked(tokens, f"r{number}"))) for number in range(20)]
    return {route.placement.engine.rank for route in routes if route is not None}


def found(gateway: Gateway, rank: int, tokens: list[int]) -> FoundPrefix:
    """Return the part of the prompt that the gateway knows to be cached."""
    cached, names = gateway.view(rank).cached, a_router().query(asked(tokens)).names
    return cached.find(names)


async def test_a_prefix_that_was_evicted_to_host_memory_attracts_the_next_request(gateway: Gateway) -> None:
    tokens = [*prompt(0), 7]
    for stem in range(4):  # two prompts fill the pool
        await gateway.complete(prompt(stem), rank=0)
        await until(lambda stem=stem: gateway.tiers(0).blocks["host"] >= (stem + 1) * PROMPT_BLOCKS)
    await until(lambda: found(gateway, 0, tokens) == FoundPrefix(host=PROMPT_BLOCKS))
    assert found(gateway, 1, tokens) == FoundPrefix()
    assert ranks_chosen(gateway, prompt(9)) == {0, 1}, "both engines must be equally idle"
    assert ranks_chosen(gateway, tokens) == {0}

    answer = await gateway.complete(tokens)
    await until(lambda: gateway.tiers(0).restored_tokens == PROMPT_BLOCKS * BLOCK_SIZE)
    await until(lambda: found(gateway, 0, tokens) == FoundPrefix(pool=PROMPT_BLOCKS))
    assert gateway.tiers(0).restore_s.keys() == {"host"}, "the engine must report its restore times"
    assert answer == await gateway.complete(tokens, rank=1), (
        "the restored prefix must give the same answer as a computed one"
    )
