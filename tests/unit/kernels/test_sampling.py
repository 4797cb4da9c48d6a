"""The dispatching `sample` draws the tokens that `reference` defines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels import sampling
from baton.kernels.sampling import (
    NO_TOKEN,
    AllowedTokens,
    BadWords,
    BannedTokens,
    LogitBias,
    Penalties,
    SamplingBatch,
    TokenHistory,
    cpu,
    reference,
)

Sample = Callable[[Tensor, SamplingBatch], Tensor]
both = pytest.mark.parametrize("sample", [reference.sample, sampling.sample], ids=["reference", "fast"])


def batch_of(rows: int, **features: Any) -> SamplingBatch:
    """Return a batch whose rows have different seeds and positions; a plain number applies to all rows."""
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    for name, dtype in dtypes.items():
        if isinstance(features.get(name), (int, float)):
            features[name] = torch.full((rows,), features[name], dtype=dtype)
    features.setdefault("temperature", torch.ones(rows))
    return SamplingBatch(**{"seeds": torch.arange(rows) + 11, "positions": torch.arange(rows) + 3, **features})


def tokens(*ids: int) -> Tensor:
    return torch.tensor(ids)


def drawn_from(sample: Sample, logits: Tensor, draws: int = 2000, **features: Any) -> set[int]:
    """Return the tokens that come up in many draws from one row of logits."""
    return set(sample(logits.expand(draws, -1), batch_of(draws, **features)).tolist())


# ---- greedy ----------------------------------------------------------------------------------------------------------


@both
def test_without_temperature_the_best_token_wins_and_of_equal_ones_the_first(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 5.0, 5.0]])
    for temperature in (None, torch.zeros(2)):
        assert sample(logits, replace(batch_of(2), temperature=temperature)).tolist() == [1, 0]


@both
def test_greedy_and_random_rows_share_a_batch(sample: Sample) -> None:
    logits = torch.zeros(200, 64)
    logits[:, 9] = 1.0
    drawn = sample(logits, batch_of(200, temperature=torch.tensor([0.0, 1.0] * 100)))
    assert drawn[::2].eq(9).all()
    assert drawn[1::2].unique().numel() > 20


@both
def test_nan_is_never_drawn_and_an_empty_row_gives_no_token(sample: Sample) -> None:
    logits = torch.zeros(4, 40)
    logits[0, :39] = math.nan
    logits[1, 1:] = math.nan
    logits[2] = -math.inf
    logits[3] = math.nan
    for temperature in (0.0, 1.0):
        assert sample(logits, batch_of(4, temperature=temperature)).tolist() == [39, 0, NO_TOKEN, NO_TOKEN]


# ---- truncation ------------------------------------------------------------------------------------------------------


def kept_by_sorting(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens of a row that min-p, top-k and top-p keep, computed over the whole sorted vocabulary."""
    order = sorted(range(len(logits)), key=lambda token: -float(logits[token]))
    weight = {token: math.exp((float(logits[token]) - float(logits[order[0]])) / temperature) for token in order}
    kept = [token for token in order if weight[token] >= min_p]
    if 0 < top_k < len(kept):
        kept = [token for token in kept if logits[token] >= logits[kept[top_k - 1]]]
    total = sum(weight[token] for token in kept)
    nucleus = [
        token
        for token in kept
        if top_p >= 1
        or logits[token] == logits[order[0]]
        or sum(weight[other] for other in kept if logits[other] > logits[token]) < top_p * total
    ]
    return set(nucleus)


@pytest.mark.exhaustive
@both
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(
    "truncation",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.6},
        {"top_p": 0.01},
        {"top_p": 0.0},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05},
    ],
)
def test_exactly_the_tokens_that_truncation_keeps_come_up(
    sample: Sample, temperature: float, truncation: dict[str, float]
) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1)).mul(4).round() / 2  # with ties
    expected = kept_by_sorting(logits, temperature, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **truncation})
    # Rare tokens may not come up, so the reference's threshold is checked for the exact set.
    assert drawn_from(sample, logits, temperature=temperature, **truncation) <= expected
    threshold = reference.truncation_threshold(
        logits[None], torch.full((1, 1), temperature).double(), batch_of(1, **truncation)
    )
    assert set((logits >= threshold[0]).nonzero().flatten().tolist()) == expected


@both
@pytest.mark.parametrize("off", [{"top_k": 0}, {"top_k": -1}, {"top_k": 300}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_neutral_truncation_changes_no_draw(sample: Sample, off: dict[str, float]) -> None:
    logits = torch.randn(64, 300)
    assert sample(logits, batch_of(64, **off)).equal(sample(logits, batch_of(64)))


@pytest.mark.parametrize("vocab_size", [100, 5000])
def test_the_nucleus_of_a_flat_row_reaches_beyond_the_first_selections(vocab_size: int) -> None:
    logits = torch.linspace(0, 0.1, vocab_size)
    threshold = reference.truncation_threshold(logits[None], torch.ones(1, 1).double(), batch_of(1, top_p=0.9))
    kept = int((logits >= threshold[0]).sum())
    assert logits.double().softmax(0).flip(0)[:kept].sum() == pytest.approx(0.9, abs=2 / vocab_size)


# ---- edits -----------------------------------------------------------------------------------------------------------


@both
def test_only_allowed_tokens_come_up(sample: Sample) -> None:
    bits = torch.tensor([[1 << 5, -(2**31), 1]], dtype=torch.int32)  # tokens 5, 63 and 64
    allowed = AllowedTokens(torch.zeros(1, dtype=torch.int64), bits)
    logits = torch.zeros(2, 70)
    seen = {tuple(sample(logits, batch_of(2, seeds=tokens(s, s), allowed=allowed)).tolist()) for s in range(300)}
    assert {first for first, _ in seen} == {5, 63, 64}
    assert len({second for _, second in seen}) > 30, "a row without a mask may draw all tokens"


@both
def test_banned_and_biased_tokens(sample: Sample) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(2, 1)
    greedy = replace(batch_of(2), temperature=None)
    assert sample(logits, replace(greedy, banned=BannedTokens(tokens(0), tokens(2)))).tolist() == [1, 2]
    bias = LogitBias(tokens(0, 1), tokens(0, 1), torch.tensor([2.5, 0.5]))
    assert sample(logits, replace(greedy, bias=bias)).tolist() == [0, 2]
    both_edits = replace(greedy, bias=bias, banned=BannedTokens(tokens(0), tokens(0)))
    assert sample(logits, both_edits).tolist() == [2, 2], "a bias cannot bring back what is banned"


@both
def test_a_bad_word_is_banned_if_the_output_ends_with_its_beginning(sample: Sample) -> None:
    table = torch.tensor([[7, 8, 1, 2, 3, 0], [7, 8, 1, 9, 3, 0], [7, 8, 1, 2, 0, 0], [1, 2, 3, 0, 0, 0]])
    history = TokenHistory(table, tokens(0, 1, 2, 3), tokens(2, 2, 2, 2))
    words = BadWords(tokens(0, 1, 2, 3, 2), torch.tensor([[2, 3, 4], [2, 3, 4], [2, 3, 4], [2, 3, 4], [-1, -1, 6]]))
    logits = torch.zeros(4, 10)
    logits[:, 4], logits[:, 6], logits[:, 5] = 3.0, 4.0, 2.0
    logits[[0, 1, 3], 6] = 0.0
    batch = replace(batch_of(4), temperature=None, positions=tokens(5, 5, 4, 3), bad_words=words, history=history)
    # Row 0 ends with 2 3, row 1 with 9 3, row 2 with 1 2 and must not draw 6; row 3 has 2 in its prompt.
    assert sample(logits, batch).tolist() == [5, 4, 4, 4]


def penalized_plainly(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> Tensor:
    result = logits.clone()
    for token in range(len(logits)):
        if token in prompt or token in output:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= frequency * output.count(token) + presence * (token in output)
    return result


@pytest.mark.slow
@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_penalties_count_as_the_papers_say(sample: Sample, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    vocab_size, rows = 12, 40
    table = torch.randint(vocab_size, (rows + 5, 30), generator=generator).to(dtype)
    prompt_lens = torch.randint(0, 10, (rows,), generator=generator)
    positions = prompt_lens + torch.randint(0, 10, (rows,), generator=generator)
    table_rows = torch.randperm(rows + 5, generator=generator)[:rows]
    penalized = torch.arange(0, rows, 2)
    numbers = torch.rand(3, len(penalized), generator=generator) * 1.5 + 0.2
    logits = torch.randn(rows, vocab_size, generator=generator) * 2
    batch = SamplingBatch(
        seeds=positions,
        positions=positions,
        penalties=Penalties(penalized, *numbers),
        history=TokenHistory(table, table_rows, prompt_lens),
    )
    expected = logits.clone()
    for i, row in enumerate(penalized.tolist()):
        before = table[table_rows[row], : positions[row]].tolist()
        prompt, output = before[: prompt_lens[row]], before[prompt_lens[row] :]
        expected[row] = penalized_plainly(logits[row], prompt, output, *numbers[:, i].tolist())
    assert sample(logits, batch).equal(expected.argmax(dim=-1))
    torch.testing.assert_close(reference.edit_logits(logits, batch), expected)
    assert cpu.edit_logits(logits, batch).equal(reference.edit_logits(logits, batch))


@both
def test_logits_stay_as_they_are(sample: Sample) -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    history = TokenHistory(torch.zeros(2, 4, dtype=torch.int32), tokens(0, 1), tokens(1, 1))
    one = torch.ones(1)
    sample(
        logits,
        batch_of(
            2,
            top_k=3,
            banned=BannedTokens(tokens(0), tokens(2)),
            penalties=Penalties(tokens(1), one * 2, one, one),
            history=history,
        ),
    )
    assert logits.equal(before)


# ---- the fast path ---------------------------------------------------------------------------------------------------

FEATURES: list[dict[str, Any]] = [
    {},
    {"top_k": torch.arange(17) * 5 - 1},
    {"top_p": torch.linspace(0, 1, 17)},
    {"min_p": torch.linspace(0, 0.4, 17)},
    {"top_k": torch.arange(17) * 9, "top_p": torch.linspace(0.05, 1, 17), "min_p": torch.linspace(0.01, 0, 17)},
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "+".join(features) or "plain")
@pytest.mark.parametrize("vocab_size", [1, 15, 63, 64, 65, 1000, 8192])
@pytest.mark.parametrize("kind", ["smooth", "ties", "masked"])
def test_the_fast_path_draws_the_same_tokens(vocab_size: int, kind: str, features: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(17, vocab_size, generator=generator) * torch.linspace(0.1, 12, 17)[:, None]
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, ::3] = -math.inf
        logits[4] = math.nan
    temperature = torch.linspace(0, 3, 17)
    temperature[3:6] = torch.tensor([1e-6, 1e-4, 80.0])
    batch = batch_of(17, temperature=temperature, seeds=torch.arange(17) * (2**62 // 17), **features)
    assert cpu.sample(logits, batch).equal(reference.sample(logits, batch))


def test_the_fast_path_decides_close_contests_by_exact_scores() -> None:
    """With so many flat rows, some winners are ahead by less than the margin of the bounds."""
    logits = torch.zeros(6000, 300)
    assert cpu.sample(logits, batch_of(6000)).equal(reference.sample(logits, batch_of(6000)))


@pytest.mark.parametrize("min_p", [0.1, 0.2, 0.3, 0.4, 0.45])
def test_min_p_is_exact_at_its_border(min_p: float) -> None:
    """The fast path decides on floats next to the border as float64 arithmetic does."""
    border = torch.tensor(min_p).double().log().float()
    around = [torch.nextafter(border, torch.tensor(towards)) for towards in (-torch.inf, border.item(), torch.inf)]
    logits = torch.stack([torch.zeros(3), torch.stack(around)], dim=1).repeat(300, 1)
    batch = batch_of(900, min_p=torch.full((900,), min_p))
    assert cpu.sample(logits, batch).equal(reference.sample(logits, batch))


def test_logits_may_be_a_slice_of_something_wider() -> None:
    wide = torch.randn(6, 200)
    view, batch = wide[::2, 10:110], batch_of(3, top_k=20)
    assert sampling.sample(view, batch).equal(sampling.sample(view.contiguous(), batch))
    assert sampling.sample(wide.T[:3], batch).equal(sampling.sample(wide.T[:3].contiguous(), batch))


def test_rows_may_start_beyond_four_gibibytes() -> None:
    stride = 2**30 + 64  # floats
    wide = torch.empty(stride + 100)  # takes memory only for pages that are written
    logits = wide.as_strided((2, 100), (stride, 1))
    logits[:] = torch.randn(2, 100)
    assert sampling.sample(logits, batch_of(2)).equal(sampling.sample(logits.clone(), batch_of(2)))


def test_without_a_compiler_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = torch.randn(4, 100), batch_of(4, top_p=0.9)
    expected = sampling.sample(logits, batch)
    monkeypatch.setattr(cpu, "kernel_of_draws", lambda: None)
    monkeypatch.setattr(cpu, "kernel_of_penalties", lambda: None)
    assert sampling.sample(logits, batch).equal(expected)


def test_numbers_of_a_wrong_kind_are_refused_before_any_memory_is_read() -> None:
    with pytest.raises(ValueError, match=r"top_k is torch\.int32"):
        cpu.sample(torch.zeros(2, 9), batch_of(2, top_k=torch.ones(2, dtype=torch.int32)))
    with pytest.raises(ValueError, match="seeds is"):
        cpu.sample(torch.zeros(2, 9), batch_of(2, seeds=torch.ones(3, dtype=torch.int64)))
    one, history = torch.ones(1), TokenHistory(torch.zeros(1, 4, dtype=torch.int64), tokens(0, 0), tokens(1, 1))
    penalties = Penalties(tokens(0), one, one, one)
    with pytest.raises(ValueError, match="holds 4 tokens a row"):
        cpu.sample(torch.zeros(2, 9), batch_of(2, positions=tokens(5, 5), penalties=penalties, history=history))
    with pytest.raises(ValueError, match=r"give batch\.history"):
        cpu.sample(torch.zeros(2, 9), batch_of(2, penalties=penalties))
