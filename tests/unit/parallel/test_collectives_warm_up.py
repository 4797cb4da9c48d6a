"""Once an engine is ready, collectives of steps of any size launch only kernels that their warm-up has launched.

Launches are recorded and skipped, as in test_profile_run_variants.py. Options of collectives are those measured on an
H200. One process imports torch and Triton, without Triton's interpreter, and each case is a fork of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from ...helpers.fake_gpu import FAKE_GPU

pytest.importorskip("triton")

SCRIPT = (
    FAKE_GPU
    + """
import json
import os
import random
import sys

from baton.engine.layers.moe import MoE
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.parallel.groups import ALONE, ExpertSpread, ParallelGroups, StubGroup
from baton.engine.parallel.symmetric import SymmetricGroup
from baton.engine.worker.warmup import warm_up_collectives
from baton.kernels import tuned
from baton.kernels.compiler import recording
from baton.kernels.p2p import PeerMemory, RoutedTokens

tuned.known = lambda op, device: tuned.entries(op, "NVIDIA_H200") if op == "p2p" else []

def forgotten(tp, dp, backend, is_warmed_up):
    def group(size):
        memory = PeerMemory.without_peers(0, size, torch.device("cpu"))
        return SymmetricGroup(StubGroup(0, size), memory) if size > 1 else ALONE

    ranks = group(dp)
    groups = ParallelGroups(group(tp), ranks, ranks if tp == 1 else StubGroup(0, tp * dp), ExpertSpread(0, backend))
    shape = {"num_experts": 16, "top_k": 3, "intermediate_size": 64, "shared_intermediate_size": 0}
    moe = MoE(256, ExpertsConfig(**shape, sparse_layers=(True,)))
    moe.divide(groups)
    moe.allocate("cpu", torch.bfloat16)
    spread, rng = moe.spread, random.Random(1)
    torch.Tensor.is_cuda, torch.Tensor.is_cpu = True, False  # for all tensors, so that kernels for a GPU are chosen

    def tokens(count):
        routing = torch.zeros(count, 3, dtype=torch.int32)
        return RoutedTokens(torch.zeros(count, 256, dtype=torch.bfloat16), routing, torch.zeros(count, 3))

    def step(count):
        groups.tp.all_reduce(torch.zeros(count, 256, dtype=torch.bfloat16))
        groups.tp.all_gather(torch.zeros(count, 512, dtype=torch.bfloat16))
        of_ranks = [rng.randint(1, count) for _ in range(dp)]
        served = spread.dispatches.eager.prepare(tokens(of_ranks[0]), spread.table, of_ranks)
        spread.dispatches.eager.finalize(torch.zeros(served.hidden.shape, dtype=torch.bfloat16), served)

    def captured(count):
        served = spread.dispatches.captured.prepare(tokens(count), spread.table, None)
        spread.dispatches.captured.finalize(torch.zeros(served.hidden.shape, dtype=torch.bfloat16), served)

    with torch.inference_mode(), recording() as variants:
        if is_warmed_up:
            warm_up_collectives(moe, groups, torch.bfloat16)
        for count in (128, 64, 32, 16, 8, 4, 2, 1):
            captured(count)
        warmed_up = len(variants)
        assert warmed_up, "nothing is launched here"
        for count in [*(1 << bits for bits in range(14)), *(rng.randint(1, 20_000) for _ in range(40))]:
            step(count)
    return sorted({json.loads(variant.specialization)["name"] for variant in variants[warmed_up:]})

for case in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        print(json.dumps(forgotten(*case)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
"""
)


WARMED_UP = [
    (1, 2, "allgather_reducescatter"),
    (1, 4, "allgather_reducescatter"),
    (2, 2, "all_to_all"),
    (4, 1, "allgather_reducescatter"),
]
CAPTURED_ONLY = (1, 4, "allgather_reducescatter")

pytestmark = pytest.mark.slow
needs_a_stand_in = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the fake device does not work beside a real one"
)


@pytest.fixture(scope="module")
def forgotten() -> dict[tuple[int, int, str, bool], list[str]]:
    """Kernels that steps launch which neither captured steps nor the warm-up, if there was one, have launched.

    The keys are tensor-parallel size, data-parallel size, backend, and whether there was a warm-up.
    """
    cases = [*((*case, True) for case in WARMED_UP), (*CAPTURED_ONLY, False)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", SCRIPT, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@needs_a_stand_in
@pytest.mark.parametrize("case", WARMED_UP, ids=str)
def test_no_collective_launches_a_kernel_that_its_warm_up_did_not(case: tuple[int, int, str], forgotten: Any) -> None:
    assert forgotten[*case, True] == []


@needs_a_stand_in
def test_captured_steps_alone_do_not_launch_all_kernels(forgotten: Any) -> None:
    left_out = " ".join(forgotten[*CAPTURED_ONLY, False])
    assert "map_experts_kernel" in left_out
    assert "gather_parts" in left_out
