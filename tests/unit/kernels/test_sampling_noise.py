"""The random numbers of the draws: correct, independent, and a function of seed, position and token only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baton.kernels.sampling import SamplingBatch, cpu, reference, sample
from baton.kernels.sampling.noise import LANES, MEMBERS, exponential, noise, philox, portable_log


def draws(logits: Tensor, count: int, *, seed: int = 5, position: int = 0, temperature: float = 1.0) -> Tensor:
    """Draw `[count]` tokens from one row of logits with one seed at successive positions."""
    positions = torch.arange(position, position + count)
    batch = SamplingBatch(
        seeds=torch.full_like(positions, seed), positions=positions, temperature=torch.full((count,), temperature)
    )
    return sample(logits.expand(count, -1).contiguous(), batch)


def assert_fits(counts: Tensor, expected: Tensor) -> None:
    """Check Pearson's chi-square to 5 standard deviations: a sound generator fails about once in a million seeds."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = counts.numel() - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom), f"chi-square {statistic:.1f} of {freedom}"


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_words_its_authors_published(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    """The expected words are the Random123 library's known answers for philox4x32 with 10 rounds."""
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_the_logarithm_is_right_to_the_last_bits() -> None:
    x = torch.cat([torch.logspace(-300, 300, 5000, dtype=torch.float64), 1 - torch.logspace(-16, -0.1, 500).double()])
    error = (portable_log(x) - x.log()).abs() / x.log().abs().clamp(min=1e-300)
    assert float(error.max()) < 1e-15


def test_noise_is_finite_for_every_word() -> None:
    digits = torch.tensor([0, 1, 2**28, 2**29 - 2, 2**29 - 1])
    least = exponential(digits, 29)
    assert least.isfinite().all()
    assert least.diff().lt(0).all()
    assert float(-portable_log(least[-1] / MEMBERS)) < 22.9
    assert (-portable_log(2 * least[0] / MEMBERS + exponential(digits[0], 32))).isfinite()


# ---- distribution of the noise ---------------------------------------------------------------------------------------


def uniform_noise(vocab_size: int, *, seeds: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """Return the noise [R, V] as numbers between 0 and 1, in which Gumbel noise is distributed evenly."""
    seeds = torch.zeros_like(positions) + 11 if seeds is None else seeds
    positions = torch.zeros_like(seeds) + 5 if positions is None else positions
    return torch.exp(-torch.exp(-noise(seeds, positions, vocab_size)))


def assert_independent(one: Tensor, other: Tensor, bins: int = 16) -> None:
    """Check that pairs of numbers between 0 and 1 fill all cells of a square evenly."""
    cells = (one * bins).long() * bins + (other * bins).long()
    counts = cells.flatten().bincount(minlength=bins**2).double()
    assert_fits(counts, torch.full_like(counts, cells.numel() / bins**2))


def test_noise_is_gumbel_noise_for_every_member_of_a_group() -> None:
    numbers = uniform_noise(MEMBERS * LANES, positions=torch.arange(100)).unflatten(1, (MEMBERS, LANES))
    for member in range(MEMBERS):
        counts = (numbers[:, member] * 128).long().flatten().bincount(minlength=128).double()
        assert_fits(counts, torch.full((128,), 100 * LANES / 128).double())


def test_great_noise_is_as_rare_as_it_must_be() -> None:
    """The greatest noise decides draws: count how often a token has more than log 1000, log 10 000 and log 100 000."""
    greatest = noise(torch.arange(50), torch.full((50,), 3), 20 * MEMBERS * LANES)
    for rarity in (1e3, 1e4, 1e5):
        expected = greatest.numel() * -math.expm1(-1 / rarity)
        assert abs(int((greatest > math.log(rarity)).sum()) - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("apart", [1, 2, 4, 7])
def test_members_of_a_group_are_independent(apart: int) -> None:
    numbers = uniform_noise(4 * MEMBERS * LANES, positions=torch.arange(40)).unflatten(1, (4, MEMBERS, LANES))
    assert_independent(numbers[:, :, :-apart], numbers[:, :, apart:])


def test_every_member_is_equally_likely_to_have_the_most_noise_whatever_the_others_have() -> None:
    numbers = uniform_noise(8 * MEMBERS * LANES, positions=torch.arange(40)).unflatten(1, (8, MEMBERS, LANES))
    order = numbers.argsort(dim=2, descending=True)
    for place, other in ((0, 1), (1, 2), (0, 7)):
        counts = (order[:, :, place] * MEMBERS + order[:, :, other]).flatten().bincount(minlength=MEMBERS**2).double()
        possible = ~torch.eye(MEMBERS, dtype=torch.bool).flatten()
        assert counts[~possible].sum() == 0
        assert_fits(counts[possible], torch.full((MEMBERS * (MEMBERS - 1),), counts.sum() / MEMBERS / (MEMBERS - 1)))


def test_groups_are_independent() -> None:
    numbers = uniform_noise(8 * MEMBERS * LANES, positions=torch.arange(20)).unflatten(1, (8 * MEMBERS, LANES))
    greatest = numbers.unflatten(1, (8, MEMBERS)).amax(dim=2) ** MEMBERS
    for apart in (1, 2, 3, 4, 128):
        assert_independent(greatest[:, :, :-apart], greatest[:, :, apart:], bins=8)
    assert_independent(greatest[:, :-1], greatest[:, 1:], bins=8)


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1 << 32, 0), (0, 1 << 32)])
def test_noise_of_neighbouring_seeds_and_positions_is_independent(seed_step: int, position_step: int) -> None:
    at = torch.arange(40)
    seeds = 77 + seed_step * at
    positions = 3 + position_step * at
    numbers = uniform_noise(2 * MEMBERS * LANES, seeds=seeds, positions=positions)
    assert_independent(numbers[:-1], numbers[1:])


# ---- draws -----------------------------------------------------------------------------------------------------------

GROUPED = 501  # number of neighbouring tokens that are counted together


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_tokens_come_up_as_often_as_softmax_says(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -math.inf, 0.25, -2.0, 2.0])
    count = 40_000
    counts = draws(logits, count, temperature=temperature).bincount(minlength=len(logits)).double()
    expected = count * (logits.double() / temperature).softmax(0)
    assert counts[7] == 0
    assert_fits(counts[expected > 0], expected[expected > 0])


def test_tokens_of_one_group_come_up_as_often_as_softmax_says() -> None:
    tokens = torch.cat([torch.arange(MEMBERS) * LANES + lane for lane in (0, 1, 255)])
    logits = torch.full((MEMBERS * LANES,), -math.inf)
    logits[tokens] = torch.linspace(-2, 2, len(tokens))
    count = 8000
    counts = draws(logits, count).bincount(minlength=len(logits))[tokens].double()
    assert counts.sum() == count
    assert_fits(counts, count * logits[tokens].double().softmax(0))


@pytest.mark.slow
def test_no_part_of_a_large_vocabulary_is_preferred() -> None:
    vocab_size, count = 32_064, 6_000
    parts = draws(torch.zeros(vocab_size), count).bincount(minlength=vocab_size).view(-1, GROUPED).sum(dim=1)
    assert_fits(parts.double(), torch.full((len(parts),), count * GROUPED / vocab_size).double())
    places = draws(torch.zeros(16 * MEMBERS * LANES), count, seed=6).remainder(MEMBERS * LANES)
    for counted in (places // LANES, places // 16 % 16, places % 16):
        counts = counted.bincount().double()
        assert_fits(counts, torch.full_like(counts, count / len(counts)))


@pytest.mark.parametrize(("seed_step", "position_step"), [(0, 1), (1, 0), (1, 1), (1 << 32, 0), (0, 1 << 32)])
def test_draws_of_neighbouring_seeds_and_positions_are_independent(seed_step: int, position_step: int) -> None:
    vocab_size, count = 8, 20_000
    at = torch.arange(count) * 2
    logits = torch.zeros(count, vocab_size)

    def at_step(step: int) -> Tensor:
        seeds, positions = 77 + seed_step * step + 0 * at, at + position_step * step
        if not position_step:
            seeds, positions = seeds + at, positions * 0
        return sample(logits, SamplingBatch(seeds=seeds, positions=positions, temperature=torch.ones(count)))

    pairs = (at_step(0) * vocab_size + at_step(1)).bincount(minlength=vocab_size**2).double()
    assert_fits(pairs, torch.full((vocab_size**2,), count / vocab_size**2).double())


def test_a_draw_depends_on_its_own_seed_position_and_logits_only() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(33, 5000, generator=generator)
    seeds = torch.randint(2**62, (33,), generator=generator)
    positions = torch.randint(10_000, (33,), generator=generator)

    def drawn(rows: Tensor) -> Tensor:
        batch = SamplingBatch(
            seeds=seeds[rows],
            positions=positions[rows],
            temperature=torch.linspace(0.2, 2, 33)[rows],
            top_p=torch.linspace(0.3, 1, 33)[rows],
        )
        return sample(logits[rows], batch)

    together = drawn(torch.arange(33))
    shuffled = torch.randperm(33, generator=generator)
    assert drawn(shuffled).equal(together[shuffled])
    assert torch.cat([drawn(torch.tensor([row])) for row in range(33)]).equal(together)


def test_draws_are_the_same_on_every_machine() -> None:
    """The expected tokens are fixed: a change of the noise changes the answers of all seeds that users keep."""
    logits = (torch.arange(1000) * 37 % 101).float() / 25
    expected = [862, 204, 759, 10, 49, 826, 652, 521]
    for draw in (cpu.sample, reference.sample):
        positions = torch.arange(8)
        seeds = torch.tensor([0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 42, 42])
        batch = SamplingBatch(seeds=seeds, positions=positions, temperature=torch.ones(8))
        assert draw(logits.repeat(8, 1), batch).tolist() == expected


def test_the_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    seeds, positions = torch.tensor([9, 8]), torch.tensor([7, 2**33])
    assert noise(seeds, positions, 5000)[:, :2500].equal(noise(seeds, positions, 2500))
