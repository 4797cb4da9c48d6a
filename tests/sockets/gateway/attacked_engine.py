"""The engine of an attacked gateway, in a separate process, so that its CPU time and memory are not the gateway's.

python -m tests.sockets.gateway.attacked_engine KEY CONFIG STEP_S

Prints its address, and serves until its input ends. CONFIG is JSON.

Its core, socket and messages are real. Its model takes no time: every step lasts STEP_S.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import time

from baton.cluster.engines.server import EngineServer
from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.logprobs import Logprobs
from baton.engine.core.messages import EngineOutput
from baton.engine.core.sampling import MAX_LOGPROBS
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.core.step import Chunk, ChunkResult, RowStart, StepPlan, StepResult
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.settings import LocalEngine

EPOCH = 1
ENGINE_ID = "attacked"
MOST_POSITIONS = 40_000


class QuickRunner:
    """A `Runner` that returns precomputed tokens and log probabilities."""

    def __init__(self, vocab_size: int) -> None:
        self._rows: dict[int, RowStart] = {}
        self._vocab_size = vocab_size
        self._ready: dict[int, Logprobs] = {}  # by width

    def launch(self, plan: StepPlan) -> FinishedStep:
        for row in plan.freed_rows:
            del self._rows[row]
        self._rows |= {start.row: start for start in plan.started_rows}
        return FinishedStep(StepResult(plan.step, [self._run(self._rows[chunk.row], chunk) for chunk in plan.chunks]))

    def _run(self, start: RowStart, chunk: Chunk) -> ChunkResult:
        end = chunk.start + chunk.num_tokens
        drawn = prompt = None
        if chunk.prompt_logprobs:
            count = min(end + 1, len(start.prompt_token_ids)) - (chunk.start + 1)
            prompt = self._logprobs(start.sampling.prompt_logprobs).part(0, count)
        if chunk.samples and start.sampling.logprobs is not None:
            drawn = self._logprobs(start.sampling.logprobs).part(end % 999, end % 999 + 1)
        return ChunkResult([100 + end % 150] if chunk.samples else [], drawn, prompt)

    def _logprobs(self, num_top: int | None) -> Logprobs:
        width = 1 + (num_top or 0)
        if width not in self._ready:
            draw, num_values = random.Random(width), MOST_POSITIONS * width
            ids = [draw.randrange(3, self._vocab_size) for _ in range(num_values)]
            values = [-draw.random() for _ in range(num_values)]
            ranks = struct.pack(f"<{MOST_POSITIONS}i", *range(1, MOST_POSITIONS + 1))
            packed = struct.pack(f"<{num_values}i", *ids), struct.pack(f"<{num_values}f", *values)
            self._ready[width] = Logprobs(width, *packed, ranks)
        return self._ready[width]

    def make_ready(self) -> None:
        """Compute the log probabilities for all widths that the attacks request."""
        for num_top in (0, 1, 5, MAX_LOGPROBS):
            self._logprobs(num_top)


class FinishedStep:
    def __init__(self, answer: StepResult) -> None:
        self._answer = answer

    def result(self) -> StepResult:
        return self._answer


class SteadyEngine(EngineCore):
    """An engine whose steps all take the same time."""

    step_s = 0.0

    def step(self) -> list[EngineOutput]:
        if self.has_work():
            time.sleep(self.step_s)
        return super().step()


def main(key: str, config: str, step_s: str) -> None:
    core_config = EngineCoreConfig(**json.loads(config))
    runner = QuickRunner(core_config.vocab_size)
    runner.make_ready()
    engine = SteadyEngine(Scheduler(core_config), runner)
    engine.step_s = float(step_s)
    server = EngineServer(engine, LocalEngine(ENGINE_ID, EPOCH, "127.0.0.1", ClusterKey.from_bytes(key.encode())))
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
