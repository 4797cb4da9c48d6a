"""Sums over the memory of peers, a process a rank.

Kernels are interpreted over files that the processes share; or run on two GPUs that reach each other's memory.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aot import compile_for_h200
from member_pool import MemberPool, device_of

from baton.engine.parallel import Member
from baton.engine.parallel.rendezvous import Meeting
from baton.kernels import tuned
from baton.kernels.all_reduce import PeerMemory, PeersOutOfReach, reference, serves
from baton.kernels.all_reduce import memory as memory_module
from baton.kernels.all_reduce.ipc import DriverError
from baton.kernels.all_reduce.memory import EMPTY, total_bytes

gpu: Any = pytest.importorskip("baton.kernels.all_reduce.gpu")

ROOM_BYTES = 128 << 10  # 512 values of a channel in one turn
BLOCK = 32
ONE_SHOT = {"method": gpu.Method.ONE_SHOT, "BLOCK": BLOCK}
TWO_SHOTS = {"method": gpu.Method.TWO_SHOTS, "BLOCK": BLOCK}
METHODS = pytest.mark.parametrize("options", [ONE_SHOT, TWO_SHOTS], ids=["one shot", "two shots"])
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="processes share memory of CPUs")


def test_the_definition_sums_in_float32_and_rounds_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert reference.all_reduce(parts).item() == 258.0  # rounded twice it stays at 256


def inputs_of(size: int, ranks: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, generator=generator).half() for _ in range(ranks)]
    for rank, x in enumerate(inputs):
        x[rank::7] = -0.0
    return inputs


def sum_in_turn(member: Member, folder: Path, sizes: list[int], options: dict[str, int], slow_rank: int) -> Any:
    """What this rank has after each of some calls, and its memory at the end."""
    files = [folder / str(rank) for rank in range(member.world_size)]
    memory = map_memory(member.rank, files)
    results = []
    for call, size in enumerate(sizes):
        if member.rank == slow_rank:
            time.sleep(0.05 * (call % 3))
        x = inputs_of(size, member.world_size, call)[member.rank]
        results.append(gpu.all_reduce(x, memory, options))
    return results, memory.turns


def map_memory(rank: int, files: list[Path]) -> PeerMemory:
    count = total_bytes(ROOM_BYTES) // 2
    maps = [torch.from_file(str(file), shared=True, size=count, dtype=torch.int16) for file in files]
    addresses = [tensor.data_ptr() for tensor in maps]
    return PeerMemory(rank, addresses, torch.device("cpu"), room_bytes=ROOM_BYTES, keeps=maps)


def make_files(folder: Path, ranks: int) -> list[Path]:
    files = [folder / str(rank) for rank in range(ranks)]
    for file in files:
        file.write_bytes(EMPTY.to_bytes(2, "little", signed=True) * (total_bytes(ROOM_BYTES) // 2))
    return files


@interpreted
@METHODS
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_come_unevenly_have_equal_sums(
    pool: MemberPool, tmp_path: Path, ranks: int, options: dict[str, int]
) -> None:
    files = make_files(tmp_path, ranks)
    sizes = [8, 40, 256, 8, 1000, 8, 8, 520]  # so that programs differ in how often they ran
    answers = pool.run(sum_in_turn, tmp_path, sizes, options, ranks - 1, tp=ranks)
    for call, size in enumerate(sizes):
        expected = reference.all_reduce(inputs_of(size, ranks, call))
        for results, _ in answers:
            assert torch.equal(results[call], expected)
    assert all(torch.equal(turns, answers[0][1]) for _, turns in answers)
    for file in files:
        left = torch.from_file(str(file), shared=True, size=total_bytes(ROOM_BYTES) // 2, dtype=torch.int16)
        assert (left == EMPTY).all(), "what was read stays behind"


@interpreted
@METHODS
def test_programs_take_several_blocks_where_there_are_more_than_programs(
    pool: MemberPool, tmp_path: Path, options: dict[str, int]
) -> None:
    make_files(tmp_path, 2)
    size = gpu.CHANNELS * BLOCK * 2 + 8
    assert gpu._programs_and_steps(options["method"], BLOCK, size, 2)[1] == (3 if options is ONE_SHOT else 2)
    answers = pool.run(sum_in_turn, tmp_path, [size], options, 0, tp=2)
    for results, _ in answers:
        assert torch.equal(results[0], reference.all_reduce(inputs_of(size, 2, 0)))


@interpreted
@METHODS
def test_nobody_is_waited_for_once_the_group_has_ended(tmp_path: Path, options: dict[str, int]) -> None:
    memory = map_memory(0, make_files(tmp_path, 2))
    threading.Timer(0.5, memory.end).start()
    gpu.all_reduce(torch.ones(64, dtype=torch.float16), memory, options)
    assert memory.ended.item() == 1


@interpreted
def test_a_sketch_waits_for_nobody() -> None:
    memory = PeerMemory.sketch(1, 4, torch.device("cpu"), room_bytes=ROOM_BYTES)
    assert gpu.all_reduce(torch.ones(64, dtype=torch.float16), memory, ONE_SHOT).shape == (64,)


@interpreted
def test_what_does_not_fit_is_the_librarys() -> None:
    small = PeerMemory.sketch(0, 2, torch.device("cpu"), room_bytes=ROOM_BYTES)
    fits = torch.zeros(256 * gpu.CHANNELS, dtype=torch.bfloat16)
    assert gpu.fitting_method(ONE_SHOT, fits, small) is gpu.Method.ONE_SHOT
    assert gpu.fitting_method(ONE_SHOT, torch.zeros(len(fits) + 8), small) is gpu.Method.LIBRARY
    assert gpu.fitting_method({**ONE_SHOT, "method": 0}, fits, small) is gpu.Method.LIBRARY
    memory = PeerMemory(0, [0, 0], torch.device("cpu"))
    assert gpu.serves(fits[:64], memory)
    for x in (fits[:63], fits[4:68], fits[:0], fits[:64].float(), fits[:256].view(16, 16)[:, :8]):
        assert not gpu.serves(x, memory)
        with pytest.raises(ValueError, match="not for the memory of peers"):
            gpu.all_reduce(x, memory)


def test_tensors_of_a_cpu_are_not_served() -> None:
    memory = PeerMemory(0, [0, 0], torch.device("cpu"))
    assert not serves(torch.zeros(64, dtype=torch.bfloat16), memory)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_untuned_options_go_from_one_shot_to_two_to_the_library(ranks: int) -> None:
    methods = [gpu.untuned(ranks, 1 << bits)["method"] for bits in range(10, 28)]
    order = {gpu.Method.ONE_SHOT: 0, gpu.Method.TWO_SHOTS: 1, gpu.Method.LIBRARY: 2}
    assert methods[0] is gpu.Method.ONE_SHOT
    assert methods[-1] is gpu.Method.LIBRARY
    assert [order[method] for method in methods] == sorted(order[method] for method in methods)
    assert (gpu.Method.TWO_SHOTS in methods) == (ranks > 2)


def test_tuned_options_are_for_this_kernel() -> None:
    for path in (tuned.LIBRARY / "all_reduce" / "tuned").glob("*.json"):
        device = path.name.partition(".triton-")[0]
        for entry in tuned.entries("all_reduce", device):
            assert entry.key.keys() == gpu.tuning_key(2, 8).keys()
            assert entry.config.keys() == gpu.untuned(2, 8).keys()
            gpu.Method(entry.config["method"])


@pytest.mark.parametrize("kernel", ["_one_shot", "_two_shots"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_values_move_in_16_bytes_past_the_first_cache(kernel: str, ranks: int) -> None:
    pointers = {"x": "*bf16", "addresses": "*i64", "turns": "*i32", "ended": "*i32"}
    numbers = dict.fromkeys(("num_vectors", "steps", "rank"), "i32")
    constants = {"RANKS": ranks, "ROOM": gpu._room(PeerMemory(0, [0], torch.device("cpu"))), "BLOCK": 1024}
    compiled = compile_for_h200(getattr(gpu, kernel), {**pointers, **numbers}, constants, num_warps=4)
    assert "ld.volatile.global.v4" in compiled.ptx
    assert "st.global.b16" not in compiled.ptx
    assert "griddepcontrol.wait" in compiled.ptx


class FakeMemory:
    """`DeviceMemory` in this process. `refused` is the call that fails, and on which rank's thread."""

    refused: tuple[str, str] | None = None
    loses_writes = False
    by_handle: dict[bytes, bytearray] = {}
    num_freed = 0

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.address = id(data)

    @classmethod
    def allocate(cls, num_bytes: int) -> FakeMemory:
        cls._refuse("allocate")
        return cls(bytearray(num_bytes))

    @classmethod
    def open(cls, handle: bytes) -> FakeMemory:
        cls._refuse("open")
        return cls(bytearray(cls.by_handle[handle]) if cls.loses_writes else cls.by_handle[handle])

    @classmethod
    def _refuse(cls, call: str) -> None:
        if cls.refused == (call, threading.current_thread().name):
            raise DriverError(f"{call} gave CUDA_ERROR")

    def handle(self) -> bytes:
        handle = self.address.to_bytes(8, "little")
        self.by_handle[handle] = self.data
        return handle

    def fill(self, value: int, count: int) -> None:
        self.data[: 2 * count] = value.to_bytes(2, "little", signed=True) * count

    def write(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self.data[offset : offset + num_bytes])

    def free(self) -> None:
        type(self).num_freed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeMemory]:
    kind = type("FakeMemoryOfOneTest", (FakeMemory,), {"by_handle": {}})
    monkeypatch.setattr(memory_module, "DeviceMemory", kind)
    return kind


def map_in_threads(size: int, machine_of: Callable[[int], str] | None = None) -> list[Any]:
    """The mappings of some ranks, or what each of them raised."""
    barrier, said, outcomes = threading.Barrier(size, timeout=10), [""] * size, [None] * size

    def be(rank: int) -> None:
        def exchange(words: str) -> list[str]:
            said[rank] = words
            barrier.wait()
            told = list(said)
            barrier.wait()
            return told if machine_of is None or "-" not in told[0][1:] else [f"+{machine_of(r)}" for r in range(size)]

        mapping = memory_module._Mapping(rank, size, 64)
        try:
            mapping.make(exchange)
        except PeersOutOfReach as error:
            mapping.free()
            mapping = error
        outcomes[rank] = mapping

    threads = [threading.Thread(target=be, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_every_rank_reaches_the_memory_of_every_other(fake: type[FakeMemory]) -> None:
    mappings = map_in_threads(3)
    assert mappings[0].addresses == mappings[1].addresses == mappings[2].addresses
    empty = EMPTY.to_bytes(2, "little", signed=True)
    assert all(data[: total_bytes(64)] == empty * (total_bytes(64) // 2) for data in fake.by_handle.values())
    for mapping in mappings:
        mapping.free()
        mapping.free()
    assert fake.num_freed == 9


@pytest.mark.parametrize("call", ["allocate", "open"])
def test_a_driver_that_refuses_is_named_to_all_ranks_alike(fake: type[FakeMemory], call: str) -> None:
    fake.refused = (call, "1")
    reasons = {str(outcome) for outcome in map_in_threads(3)}
    assert reasons == {f"rank 1: {call} gave CUDA_ERROR"}
    assert fake.num_freed == (2 if call == "allocate" else 7)


def test_memory_that_loses_what_peers_write_is_not_used(fake: type[FakeMemory]) -> None:
    fake.loses_writes = True
    reasons = {str(outcome) for outcome in map_in_threads(2)}
    assert reasons == {"rank 0: what rank 1 wrote to its memory did not arrive"}


def test_ranks_on_several_machines_are_out_of_reach(fake: type[FakeMemory]) -> None:
    outcomes = map_in_threads(2, machine_of=lambda rank: f"machine {rank}")
    assert {str(outcome) for outcome in outcomes} == {"the ranks are on several machines"}
    assert not fake.by_handle


# ---------------------------------------------------------------------- on two GPUs

ON_DEVICE = [
    {"method": method, "BLOCK": block}
    for method in (gpu.Method.ONE_SHOT, gpu.Method.TWO_SHOTS)
    for block in (512, 1024, 2048, 4096)
]
DEVICE_SIZES = (8, 2048, 4104, 64 * 4096, 200 * 4096 + 8)
DEVICE_REPLAYS = 200
DEVICE_TIMEOUT_S = 150.0  # each process compiles, or waits for the other that does


def on_two_gpus(test: Any) -> Any:
    return pytest.mark.gpu(2)(pytest.mark.timeout(2 * DEVICE_TIMEOUT_S)(test))


def exchange_of(member: Member, name: str) -> Callable[[str], list[str]]:
    meeting = Meeting(member.rendezvous, member.rank, timeout_s=DEVICE_TIMEOUT_S)
    numbers = itertools.count()

    def exchange(words: str) -> list[str]:
        number = next(numbers)
        meeting.put(f"{name}/{number}/{member.rank}", words)
        return [meeting.get(f"{name}/{number}/{rank}") for rank in range(member.world_size)]

    return exchange


def share_memory(member: Member) -> tuple[PeerMemory, Callable[[str], list[str]]]:
    torch.cuda.set_device(device_of(member))
    exchange = exchange_of(member, "sums")
    return PeerMemory.share(member.rank, member.world_size, device_of(member), exchange), exchange


def sums_on_device(member: Member, dtype: torch.dtype) -> list[str]:
    """What differs from the definition."""
    memory, exchange = share_memory(member)
    wrong = []
    for number, size in enumerate(DEVICE_SIZES):
        inputs = [x.to(device_of(member), dtype) for x in inputs_of(size, member.world_size, number)]
        expected = reference.all_reduce(inputs)
        for options in ON_DEVICE:
            if not torch.equal(gpu.all_reduce(inputs[member.rank].clone(), memory, options), expected):
                wrong.append(f"{size} {options}")
    exchange("done")
    return wrong


@on_two_gpus
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_devices_sums_are_those_of_the_definition(pool: MemberPool, dtype: torch.dtype) -> None:
    assert pool.run(sums_on_device, dtype, tp=2, device="cuda", timeout_s=DEVICE_TIMEOUT_S) == [[], []]


def uneven_replays(member: Member) -> tuple[int, int]:
    """How many values were wrong in replays of a graph, and how many are left in this rank's memory."""
    device = device_of(member)
    memory, exchange = share_memory(member)
    cases = []
    for number, size in enumerate(DEVICE_SIZES):
        inputs = [x.to(device, torch.bfloat16) for x in inputs_of(size, member.world_size, 50 + number)]
        given = inputs[member.rank]
        cases.append((given, torch.empty_like(given), reference.all_reduce(inputs), ON_DEVICE[number * 3 % 8]))
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def work() -> None:
        for given, x, expected, options in cases:
            x.copy_(given)
            gpu.all_reduce(x, memory, options)
            wrong.add_((x != expected).sum())

    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="relaxed")
        work()
        graph.capture_end()
        for replay in range(DEVICE_REPLAYS):
            if replay % 5 == 3 * member.rank:
                torch.cuda._sleep(50_000)  # cycles: now this rank's device comes late, now the other's
            if replay % 50 == 10 * member.rank:
                time.sleep(0.002)
            graph.replay()
            if replay % 37 == 0:
                work()  # between replays, kernel by kernel
        stream.synchronize()
    exchange("done")
    mapping: Any = memory._keeps
    left = torch.frombuffer(mapping._memory[member.rank].read(0, total_bytes(memory.room_bytes)), dtype=torch.int16)
    return int(wrong), int((left != EMPTY).sum())


@on_two_gpus
def test_on_devices_that_come_unevenly_replays_give_equal_sums_and_leave_nothing_behind(pool: MemberPool) -> None:
    assert pool.run(uneven_replays, tp=2, device="cuda", timeout_s=DEVICE_TIMEOUT_S) == [(0, 0), (0, 0)]


def wait_in_vain(member: Member) -> tuple[bool, float]:
    """Whether rank 0's sum waits for the other, which does not come, and seconds until it has ended."""
    memory, exchange = share_memory(member)
    waits, elapsed_s = False, 0.0
    if member.rank == 0:
        x = torch.ones(4096, dtype=torch.bfloat16, device=device_of(member))
        gpu.all_reduce(x, PeerMemory.sketch(0, 2, x.device), ON_DEVICE[1])  # compiles
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        gpu.all_reduce(x, memory, ON_DEVICE[1])
        done.record()
        time.sleep(0.2)
        waits, begin = not done.query(), time.monotonic()
        memory.end()
        while not done.query() and time.monotonic() - begin < 10:
            time.sleep(0.001)
        elapsed_s = time.monotonic() - begin
    exchange("done")
    return waits, elapsed_s


@on_two_gpus
def test_a_device_that_waits_for_a_peer_in_vain_is_freed_by_the_end_of_the_group(pool: MemberPool) -> None:
    (waits, elapsed_s), _ = pool.run(wait_in_vain, tp=2, device="cuda", timeout_s=DEVICE_TIMEOUT_S)
    assert waits
    assert elapsed_s < 1.0
