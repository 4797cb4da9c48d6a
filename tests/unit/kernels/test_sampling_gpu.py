"""Sampling in Triton, interpreted on a CPU or compiled on a GPU, draws the tokens of the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.core.sampling import SamplingParams
from baton.kernels.sampling import ROW_WORDS, SamplingBatch, SamplingRows, encode_row, reference, sample_rows
from baton.kernels.sampling.noise import noise

from ...helpers.aot import compile_for_h200

pytestmark = pytest.mark.exhaustive
ROWS = 9
TEMPERATURES = torch.tensor([0.0, 1e-6, 1e-4, 0.2, 0.7, 1.0, 1.4, 3.0, 80.0])
TRUNCATIONS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "top-k": {"top_k": torch.tensor([-1, 3, 1, 0, 7, 200, 25, 60, 2])},
    "top-p": {"top_p": torch.tensor([0.5, 0.9, 1.0, 0.01, 0.7, 0.95, 0.3, 0.99, 0.0])},
    "min-p": {"min_p": torch.tensor([0.2, 0.0, 0.5, 0.1, 1.0, 0.05, 0.01, 0.3, 0.9])},
}
TRUNCATIONS["all"] = {
    name: numbers for one in ("top-k", "top-p", "min-p") for name, numbers in TRUNCATIONS[one].items()
}
KINDS = ("smooth", "ties", "equal", "masked", "infinite")


@pytest.fixture
def small_tiles(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tiles so small that a vocabulary of a few hundred tokens has several tiles, shares and passes."""
    from baton.kernels.sampling.gpu import draw, truncation

    monkeypatch.setattr(draw, "OPTIONS", {"programs": 3 * ROWS})
    monkeypatch.setattr(truncation, "LANES", 32)


def logits_of(kind: str, vocab_size: int, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator) * torch.linspace(0.1, 9, rows)[:, None]
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = (logits > 1).float() * 2
    elif kind == "masked":
        logits[:, ::3] = -math.inf
        logits[4], logits[5], logits[6, 1:] = math.nan, -math.inf, math.nan
    elif kind == "infinite":
        logits[::2, [vocab_size // 3, vocab_size // 2]] = math.inf
    return logits.to(dtype)


def batch_for(logits: Tensor, **features: Tensor) -> SamplingBatch:
    slots = torch.arange(len(logits))
    seeds, positions = slots * (2**62 // 9) + 5, slots * 1000 + 3
    temperature = TEMPERATURES.repeat(-(-len(logits) // ROWS))[: len(logits)]
    batch = SamplingBatch(seeds=seeds, positions=positions, **{"temperature": temperature, **features})
    return on(logits.device, batch)


def on(device: torch.device, batch: SamplingBatch) -> SamplingBatch:
    names = ("seeds", "positions", "temperature", "top_k", "top_p", "min_p")
    return replace(batch, **{n: getattr(batch, n).to(device) for n in names if getattr(batch, n) is not None})


def drawn(logits: Tensor, batch: SamplingBatch) -> Tensor:
    from baton.kernels.sampling import gpu

    return gpu.sample(logits, batch)


# ---- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 - 1, 2**40 + 5), (2**31, 2**31), (77, 2**32 - 1)])
def test_noise_is_that_of_the_definition_to_the_last_bit(triton_device: torch.device, seed: int, position: int) -> None:
    from .noise_kernel import noise_of_tokens

    expected = noise(torch.tensor([seed]), torch.tensor([position]), 4096)[0]
    assert noise_of_tokens(4096, seed, position, triton_device).cpu().equal(expected)


# ---- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "truncation"),
    [
        *(("smooth", truncation) for truncation in TRUNCATIONS),
        *((kind, "all") for kind in KINDS[1:]),
        ("ties", "plain"),
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_tokens_are_those_of_the_reference(triton_device: torch.device, kind: str, truncation: str) -> None:
    several_tiles = 4500 if truncation == "plain" else 150
    for vocab_size in (1, several_tiles) if kind != "infinite" else (150,):
        logits = logits_of(kind, vocab_size).to(triton_device)
        batch = batch_for(logits, **TRUNCATIONS[truncation])
        assert drawn(logits, batch).equal(reference.sample(logits, batch))


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_half_precision_is_read_as_it_is(triton_device: torch.device) -> None:
    logits = logits_of("smooth", 150, torch.float16).to(triton_device)
    batch = batch_for(logits, **TRUNCATIONS["all"])
    assert drawn(logits, batch).equal(reference.sample(logits.float(), batch))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("small_tiles")
def test_close_contests_are_decided_by_exact_scores(triton_device: torch.device, seed: int) -> None:
    """In flat rows many tokens pass the filters by bounds. Their scores, not the rounded bounds, must decide."""
    logits = torch.zeros(10, 190 if seed else 5000, device=triton_device)
    batch = batch_for(logits, temperature=torch.ones(10))
    batch = replace(batch, seeds=batch.seeds + seed)
    assert drawn(logits, batch).equal(reference.sample(logits, batch))


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_without_a_temperature_every_row_is_greedy(triton_device: torch.device) -> None:
    logits = logits_of("ties", 150).to(triton_device)
    batch = replace(batch_for(logits), temperature=None)
    assert drawn(logits, batch).equal(logits.argmax(dim=-1))


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_rows_read_their_parameters_from_the_table_and_padding_draws_token_0(triton_device: torch.device) -> None:
    from baton.kernels.sampling import gpu

    requests = [SamplingParams(temperature=i / 3, top_k=5 * i, top_p=1 - i / 20, min_p=i / 100) for i in range(6)]
    words = [encode_row(request, seed=2**62 + i, prompt_len=i) for i, request in enumerate(requests)]
    table = torch.stack([torch.from_numpy(row) for row in words])
    rows, positions = torch.tensor([4, -1, 0, 5, 2, -1]).int(), torch.arange(6).int() + 9
    logits = logits_of("smooth", 150, rows=6)
    logits[5] = math.nan
    ours = gpu.sample_rows(*(part.to(triton_device) for part in (logits, table, rows, positions))).cpu()
    assert ours.dtype == torch.int64
    assert ours.equal(sample_rows(logits, table, rows, positions))
    assert ours[[1, 5]].tolist() == [0, 0]


@pytest.mark.usefixtures("small_tiles")
def test_no_rows_give_no_tokens(triton_device: torch.device) -> None:
    logits = torch.zeros(0, 50, device=triton_device)
    assert drawn(logits, batch_for(logits)).shape == (0,)


def test_tensors_that_the_kernels_cannot_read_are_refused(triton_device: torch.device) -> None:
    from baton.kernels.sampling import gpu

    logits, rows = torch.zeros(2, 50, device=triton_device), torch.zeros(2, dtype=torch.int32, device=triton_device)
    table = torch.zeros(4, ROW_WORDS, dtype=torch.int32, device=triton_device)
    with pytest.raises(ValueError, match=r"give contiguous int32 \[rows, 8\]"):
        gpu.sample_rows(logits, table[:, :7], rows, rows)
    with pytest.raises(ValueError, match=r"positions \[1\] for logits \[2, 50\]"):
        gpu.sample_rows(logits, table, rows, rows[:1])


# ---- truncation ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("truncation", ["top-k", "top-p", "min-p", "all"])
@pytest.mark.parametrize("kind", ["smooth", "ties", "equal", "masked"])
@pytest.mark.usefixtures("small_tiles")
def test_truncation_keeps_the_tokens_that_the_reference_keeps(
    triton_device: torch.device, kind: str, truncation: str, dtype: torch.dtype
) -> None:
    from baton.kernels.sampling.batch import encode_batch
    from baton.kernels.sampling.gpu.truncation import truncate

    logits = logits_of(kind, 150, dtype).to(triton_device)
    warm = TEMPERATURES.clamp(min=0.01)
    batch = batch_for(logits, temperature=warm, **TRUNCATIONS[truncation])
    clean = logits.float().nan_to_num(nan=-math.inf, neginf=-math.inf)
    expected = reference.truncation_threshold(clean, warm.double()[:, None].to(triton_device), batch)
    floors, _ = truncate(logits, encode_batch(batch), torch.arange(ROWS, device=triton_device))
    assert (clean >= floors[:, None]).equal(clean.double() >= expected)


@pytest.mark.slow
@pytest.mark.parametrize("min_p", [0.1, 0.3, 0.45])
@pytest.mark.usefixtures("small_tiles")
def test_min_p_is_exact_at_its_border(triton_device: torch.device, min_p: float) -> None:
    border = torch.tensor(min_p).double().log().float()
    around = [torch.nextafter(border, torch.tensor(towards)) for towards in (-math.inf, border.item(), math.inf)]
    logits = torch.stack([torch.zeros(3), torch.stack(around)], dim=1).repeat(5, 1).to(triton_device)
    batch = batch_for(logits, temperature=torch.ones(15), min_p=torch.full((15,), min_p))
    assert drawn(logits, batch).equal(reference.sample(logits, batch))


# ---- compiled --------------------------------------------------------------------------------------------------------

_ROW = {"table_ptr": "*i32", "rows_ptr": "*i32", "vocab_size": "i32:16", "logits_stride": "i32:16"}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_draw_compiles_for_an_h200_and_rounds_as_it_is_written(dtype: str) -> None:
    pytest.importorskip("triton")
    from baton.kernels.sampling.gpu import draw

    pointers = {
        "positions_ptr": "*i32",
        "floors_ptr": "*fp32",
        "scoreboards_ptr": "*i32",
        "scores_ptr": "*fp64",
        "winners_ptr": "*i32",
        "tokens_ptr": "*i64",
    }
    registers = draw.MOST_REGISTERS[2 if dtype == "bf16" else 4]
    options = {"num_warps": draw.NUM_WARPS, "maxnreg": registers, "enable_fp_fusion": False}
    signature = {"logits_ptr": f"*{dtype}", **_ROW, **pointers}
    compiled = compile_for_h200(draw.draw_share_kernel, signature, {"MOST_SHARES": 128}, **options)
    assert "fma.rn.f64" not in compiled.ptx
    assert "mul.rn.f64" in compiled.ptx
    assert compiled.widest_load_bytes == 16
    assert compiled.ptx.count("max.bf16x2") >= 28 * (dtype == "bf16"), "bfloat16 logits must be compared in pairs"
    assert compiled.registers <= registers
    if dtype == "bf16":
        assert "ttg.convert_layout" not in compiled.ttgir, "threads must have the words of the groups that they load"


@pytest.mark.parametrize(("dtype", "zero_bits"), [("bf16", 16), ("fp32", 0)])
def test_truncation_compiles_for_an_h200(dtype: str, zero_bits: int) -> None:
    pytest.importorskip("triton")
    from baton.kernels.sampling.gpu import draw, truncation

    constants = {"ZERO_BITS": zero_bits, "LANES": truncation.LANES, "SCOREBOARD_WORDS": draw.SCOREBOARD_WORDS}
    options = {"num_warps": truncation.NUM_WARPS, "enable_fp_fusion": False}
    signature = {"logits_ptr": f"*{dtype}", **_ROW, "floors_ptr": "*fp32", "scoreboards_ptr": "*i32"}
    compiled = compile_for_h200(truncation.truncate_kernel, signature, constants, **options)
    assert compiled.widest_load_bytes >= 8


# ---- on a GPU only ---------------------------------------------------------------------------------------------------

VOCAB = 151_936


@pytest.mark.gpu
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_of_a_real_vocabulary_are_those_of_the_reference(dtype: torch.dtype, kind: str, truncation: str) -> None:
    logits = logits_of(kind, VOCAB, dtype).cuda()
    batch = batch_for(logits, **TRUNCATIONS[truncation])
    assert drawn(logits, batch).equal(reference.sample(logits.float(), batch))


@pytest.mark.gpu
def test_tokens_come_up_as_often_as_softmax_says() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -math.inf, 0.25, -2.0, 2.0])
    count = 60_000
    positions = torch.arange(count, device="cuda")
    batch = SamplingBatch(seeds=0 * positions + 5, positions=positions, temperature=torch.ones(count, device="cuda"))
    counts = drawn(logits.expand(count, -1).contiguous().cuda(), batch).bincount(minlength=11).double().cpu()
    expected = count * logits.double().softmax(0)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - expected) ** 2 / expected)[possible].sum())
    assert abs(statistic - 9) < 5 * math.sqrt(2 * 9)


@pytest.mark.gpu
def test_a_captured_graph_draws_for_later_rows() -> None:
    logits = logits_of("smooth", VOCAB, torch.bfloat16).cuda()
    words = [encode_row(SamplingParams(temperature=i / 5, top_k=9 * i), seed=i, prompt_len=1) for i in range(ROWS)]
    table = torch.stack([torch.from_numpy(row) for row in words]).cuda()
    rows, positions = (torch.arange(ROWS, dtype=torch.int32, device="cuda") for _ in range(2))
    sample_rows(logits, table, rows, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_rows(logits, table, rows, positions)
    for step in range(3):
        rows.copy_(rows.roll(1))
        rows[step] = -1
        positions += 1
        logits.copy_(logits.roll(1, dims=0))
        graph.replay()
        assert tokens.equal(sample_rows(logits, table, rows, positions))
        assert int(tokens[step]) == 0


@pytest.mark.gpu
def test_a_step_with_every_feature_does_not_wait_for_the_device() -> None:
    from baton.kernels import sampling

    table = torch.randint(VOCAB, (4, 64), dtype=torch.int32, device="cuda")
    rows = SamplingRows(4, VOCAB, table)
    request: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
    request |= {"presence_penalty": 0.4, "min_tokens": 4, "max_tokens": 9, "logit_bias": {3: 1.5}}
    everything = SamplingParams(**request, allowed_token_ids=[4, 6, 8], bad_words_token_ids=[[4], [6, 8]])
    for row in range(4):
        rows.start(row, everything, seed=row, prompt_len=3, stop_token_ids=[0, 1])
    logits = torch.randn(4, VOCAB, device="cuda").bfloat16()
    sampling.sample(logits, rows.batch([0, 1, 2, 3], [5, 5, 5, 5]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sampling.sample(logits, rows.batch([3, 2, 1, 0], [6, 6, 6, 6]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(tokens.tolist()) <= {4, 6, 8}


@pytest.mark.gpu
def test_rows_may_start_beyond_four_gibibytes() -> None:
    stride = 2**30 + 64  # elements: the third row starts beyond 2**31 of them
    wide = torch.empty(2 * stride + 300, dtype=torch.bfloat16, device="cuda")
    logits = wide.as_strided((3, 300), (stride, 1))
    logits.copy_(torch.randn(3, 300))
    batch = batch_for(logits, temperature=torch.ones(3), top_p=torch.tensor([0.9, 0.8, 0.7]))
    assert drawn(logits, batch).equal(reference.sample(logits.float(), batch))
