"""Benchmark of moving prompts' blocks from one group of processes to another, compared with raw NIXL.

The connector and raw NIXL take turns with the same memory and the same descriptors (`descriptors.py`). The connector is
timed from `receive` to `Received`: claim, grant, reads on all ranks, commit, and waking two threads on each side. Raw
NIXL is timed on every rank while it prepares, posts and polls one transfer for each rank of the other side, and the
slowest rank counts. It makes its byte ranges before and releases its handles after, wakes no thread and sends nothing.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.engine.core.layout import KVLayout
from baton.engine.net.curve import ClusterKey

from .ranks import BenchFailed, Prompt, RankProcess, Ranks, RankSpec
from .stages import HandoffStage, since_asked

__all__ = ["BenchFailed", "TransferCase", "TransferRow", "measure", "table"]

# 1.8 MB a block:
DEFAULT_LAYOUT = KVLayout(model="bench", num_layers=28, num_kv_heads=8, head_dim=128, dtype="bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferCase:
    """The prompts to move, and the two groups of processes between which to move them."""

    num_tokens: Sequence[int] = (16, 64, 256, 1024)  # of a prompt
    in_flight: Sequence[int] = (1, 4)  # prompts handed off at the same time
    repeats: int = 15
    run_blocks: int = 1  # number of blocks that are neighbours on both sides
    device: str = "cpu"
    prefill_tp: int = 1
    decode_tp: int = 1
    seed: int = 0
    stages: bool = False  # rank 0 of both sides stamps each stage, which takes some microseconds

    def num_blocks(self, layout: KVLayout) -> int:
        """Return the number of blocks that each rank keeps."""
        largest = max(-(-length // layout.block_size) for length in self.num_tokens) * max(self.in_flight)
        return -(-largest // self.run_blocks) * self.run_blocks

    def memory_bytes(self, layout: KVLayout) -> int:
        """Return the size of all ranks' blocks. Raises `UnevenHeads` if heads cannot be divided over the ranks."""
        sizes = (self.prefill_tp, self.decode_tp)
        heads = sum(len(layout.heads_of(rank, size)) for size in sizes for rank in range(size))
        return self.num_blocks(layout) * heads * layout.head_bytes


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repeats, for prompts of one length."""

    num_tokens: int
    in_flight: int  # prompts handed off at the same time
    num_bytes: int  # of all these prompts, on all ranks of the reader
    descriptors: int
    gb_per_s: float
    raw_gb_per_s: float
    ratio: float  # median over the repeats of raw time / connector time, each pair measured back to back
    stages_us: dict[str, float]  # since the call of `receive`; empty unless stamped


def measure(layout: KVLayout, case: TransferCase) -> dict[str, Any]:
    """Measure moves of a layout's blocks between two groups.

    On "cuda" the holder's ranks take the first GPUs and the reader's the next ones, beginning again at the first if
    there are too few. Raises `BenchFailed`, and `UnevenHeads` if the heads cannot be divided over the ranks.
    """
    holder = RankSpec(
        side="holder",
        layout=layout,
        num_blocks=case.num_blocks(layout),
        device=case.device,
        first_device=0,
        key=ClusterKey.generate(),
        size=case.prefill_tp,
        stamped=case.stages,
    )
    reader = dataclasses.replace(holder, side="reader", first_device=case.prefill_tp, size=case.decode_tp)
    with Ranks() as ranks:
        bench = _Bench(ranks.start(holder), ranks.start(reader))
        rng = random.Random(case.seed)
        rows = [
            bench.row(length, width, case.repeats, case.run_blocks, rng)
            for length in case.num_tokens
            for width in case.in_flight
        ]
        return {
            "device": case.device,
            "block_bytes": layout.block_bytes,
            "prefill_tp": case.prefill_tp,
            "decode_tp": case.decode_tp,
            "run_blocks": case.run_blocks,
            "repeats": case.repeats,
            "rows": [msgspec.to_builtins(row) for row in rows],
        }


def table(result: dict[str, Any]) -> str:
    """Format a result of `measure` as a table."""
    lines = [f"{'tokens':>7} {'at once':>7} {'MB':>8} {'descriptors':>11} {'GB/s':>7} {'raw GB/s':>8} {'ratio':>6}"]
    for row in result["rows"]:
        lines.append(
            f"{row['num_tokens']:7d} {row['in_flight']:7d} {row['num_bytes'] / 1e6:8.1f} {row['descriptors']:11d}"
            f" {row['gb_per_s']:7.2f} {row['raw_gb_per_s']:8.2f} {row['ratio']:6.2f}"
        )
    return "\n".join([*lines, *_stage_lines(result["rows"])])


def _stage_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format stages in microseconds, with a column for each row. Empty: none were stamped."""
    if not any(row["stages_us"] for row in rows):
        return []
    heads = [f"{row['num_tokens']} x {row['in_flight']}" for row in rows]
    lines = ["", f"{'us since it was asked':<24}" + "".join(f"{head:>10}" for head in heads)]
    for stage in HandoffStage:
        lines.append(f"{stage:<24}" + "".join(f"{row['stages_us'][stage]:10.0f}" for row in rows))
    raw = (row["num_bytes"] / row["raw_gb_per_s"] / 1e3 for row in rows)
    return [*lines, f"{'raw NIXL, all of it':<24}" + "".join(f"{each:10.0f}" for each in raw)]


class _Bench:
    """Two connected groups of ranks."""

    def __init__(self, holders: list[RankProcess], readers: list[RankProcess]) -> None:
        self._holders, self._readers = holders, readers
        self._layout = holders[0].spec.layout
        self._stamped = tuple(HandoffStage) if holders[0].spec.stamped else ()
        self._stages: list[dict[HandoffStage, float]] = []
        raw = [holder.call("raw") for holder in holders]
        kept = [holder.spec.heads for holder in holders]
        for reader in readers:
            reader.call("meet", raw, kept, holders[0].call("address"))

    def row(self, num_tokens: int, in_flight: int, repeats: int, run_blocks: int, rng: random.Random) -> TransferRow:
        count = -(-num_tokens // self._layout.block_size)
        ours: list[float] = []
        raw: list[float] = []
        self._stages.clear()
        descriptors = 0
        for number in range(repeats + 2):  # the first two warm up
            prompts = [
                (_blocks(count, run_blocks, rng, part), _blocks(count, run_blocks, rng, part))
                for part in range(in_flight)
            ]
            descriptors = sum(reader.call("num_descriptors", prompts) for reader in self._readers)
            turns = [lambda p=prompts: raw.append(self._time_raw(p)), lambda p=prompts: ours.append(self._time_ours(p))]
            for turn in turns if number % 2 else turns[::-1]:
                turn()
        ours, raw = ours[2:], raw[2:]
        num_bytes = count * in_flight * sum(reader.spec.block_bytes for reader in self._readers)
        return TransferRow(
            num_tokens=num_tokens,
            in_flight=in_flight,
            num_bytes=num_bytes,
            descriptors=descriptors,
            gb_per_s=num_bytes / statistics.median(ours) / 1e9,
            raw_gb_per_s=num_bytes / statistics.median(raw) / 1e9,
            ratio=statistics.median(theirs / mine for theirs, mine in zip(raw, ours, strict=True)),
            stages_us={stage: statistics.median(each[stage] for each in self._stages[2:]) for stage in self._stamped},
        )

    def _time_ours(self, prompts: list[Prompt]) -> float:
        tickets = self._holders[0].call("offer", [source for source, _ in prompts])
        seconds: float = self._readers[0].call("receive", tickets, [target for _, target in prompts])
        if self._stamped:
            self._stages.append(since_asked(self._readers[0].call("stages"), self._holders[0].call("stages")))
        self._compare(prompts[-1][0][-1], prompts[-1][1][-1])
        return seconds

    def _time_raw(self, prompts: list[Prompt]) -> float:
        for reader in self._readers:
            reader.order("receive_raw", prompts)
        return max(reader.answer() for reader in self._readers)

    def _compare(self, source: int, target: int) -> None:
        kept = [holder.call("heads_of", source) for holder in self._holders]
        for reader in self._readers:
            for head, found in reader.call("heads_of", target).items():
                if found not in [heads[head] for heads in kept if head in heads]:
                    raise BenchFailed(f"block {target} holds something else than the holder's block {source}")


def _blocks(count: int, run_blocks: int, rng: random.Random, part: int) -> list[int]:
    """Choose the blocks of one prompt: runs of neighbours in random order, in the prompt's own part of the memory."""
    runs = list(range(-(-count // run_blocks)))
    rng.shuffle(runs)
    blocks = [run * run_blocks + offset for run in runs for offset in range(run_blocks)]
    return [part * count + block for block in blocks if block < count]
