"""`LLM(tensor_parallel_size=2)` starts another process, which works, and ends in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.cli.processes import Process, wait_until_gone
from baton.engine import LLM, InvalidEngineConfig, SamplingParams
from baton.engine.core.engine import EngineFailed
from baton.engine.parallel import GroupFailed

from ...helpers.checkpoints import edit_config, write_checkpoint
from ...helpers.local_member_processes import SOON_S, assert_members_end, members

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def make(folder: Path) -> Callable[..., LLM]:
    def make(**args: Any) -> LLM:
        small = {"skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 64}
        return LLM(str(folder), **{**small, "tensor_parallel_size": 2, **args})

    return make


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    before = set(members())
    yield
    assert_members_end(but=before)


def tokens(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def until_it_fails(llm: LLM) -> None:
    while True:
        tokens(llm)


def once_there(act: Callable[[int], None]) -> threading.Thread:
    """Call `act` with the process id of the other member as soon as it exists."""

    def wait() -> None:
        deadline = time.monotonic() + SOON_S
        while not (found := members()) and time.monotonic() < deadline:
            time.sleep(0.005)
        act(found[0])

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_two_ranks_answer_as_one_beside_another_engine_and_end_with_the_context_manager_or_the_engine(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the start are deleted once all ranks are connected, so a killed process cannot leave any."""
    with make(tensor_parallel_size=1) as alone:
        expected = tokens(alone)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with make() as first:
        second = make(load_format="dummy")
        assert list(tmp_path.glob("baton-*")) == []
        assert len(members()) == 2
        assert tokens(first) == expected
        others = tokens(second)
        assert others != expected
        assert (tokens(first), tokens(second)) == (expected, others)  # both have been idle in between
        del second
        assert len(members()) == 1
        assert tokens(first) == expected
    assert members() == []


@pytest.mark.slow
def test_a_script_without_a_main_guard_works_and_ends(folder: Path) -> None:
    script = (
        "from baton.engine import LLM, SamplingParams\n"
        f"llm = LLM({str(folder)!r}, skip_tokenizer_init=True, device='cpu', tensor_parallel_size=2)\n"
        "print(len(llm.generate([1, 2], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


def test_ctrl_c_while_torch_imports_numpy_is_raised(folder: Path) -> None:
    script = (
        "import sys\n"
        "from baton.engine import LLM\n"
        "assert not {'numpy', 'torch'} & sys.modules.keys()\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'numpy':\n"
        "            sys.meta_path.remove(self)\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"LLM({str(folder)!r}, skip_tokenizer_init=True, device='cpu', tensor_parallel_size=2)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.endswith("KeyboardInterrupt\n"), done.stderr


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.9])
def test_a_member_that_dies_while_starting_ends_the_start(make: Callable[..., LLM], delay_s: float) -> None:
    def kill(pid: int) -> None:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)

    begun = time.monotonic()
    killer = once_there(kill)
    with pytest.raises(GroupFailed, match=r"rank 1 (failed: its process ended with exit code -9|has gone)"):
        make()
    assert time.monotonic() - begun < SOON_S
    killer.join()


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_member_that_dies_ends_the_engine(make: Callable[..., LLM], when: str) -> None:
    llm = make()
    if when == "between steps":
        tokens(llm)
        os.kill(members()[0], signal.SIGKILL)
    else:
        threading.Timer(0.1, lambda: os.kill(members()[0], signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(EngineFailed, match="rank 1"):
        until_it_fails(llm)
    assert time.monotonic() - begun < SOON_S
    llm.close()


def test_a_member_that_hangs_is_given_up_after_the_timeout(make: Callable[..., LLM]) -> None:
    llm = make(distributed_timeout_seconds=1.0)
    tokens(llm)
    (member,) = members()
    os.kill(member, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(EngineFailed, match="failed while it waited for the other ranks"):
        tokens(llm)
    assert time.monotonic() - begun < SOON_S
    llm.close()  # the member does not respond, so it is killed


def test_members_of_a_process_that_is_killed_end_by_themselves(folder: Path) -> None:
    script = (
        "from baton.engine import LLM, SamplingParams\n"
        f"llm = LLM({str(folder)!r}, skip_tokenizer_init=True, device='cpu', tensor_parallel_size=2)\n"
        "print('ready', flush=True)\n"
        "while True: llm.generate([1, 2], SamplingParams(max_tokens=30), use_tqdm=False)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (member,) = members(process.pid)
        orphan = Process.of(member)
        assert orphan is not None
        process.kill()
    assert wait_until_gone([orphan], SOON_S) == []


def test_a_start_that_is_interrupted_between_two_members_ends_the_first(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begin = subprocess.Popen

    def interrupted(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        if members():
            raise KeyboardInterrupt
        return begin(*words, **options)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        make(data_parallel_size=2)
    assert members() == []
    assert list(tmp_path.iterdir()) == []
    del caught  # until here the traceback keeps the objects of the start


@pytest.mark.slow
def test_errors_of_all_members_are_raised_unchanged(folder: Path, tmp_path: Path, make: Any) -> None:
    with pytest.raises(InvalidEngineConfig, match="does not divide the model's num_attention_heads"):
        make(tensor_parallel_size=3)
    with pytest.raises(InvalidEngineConfig, match=r"num_gpu_blocks_override: 5 blocks hold 80 tokens"):
        make(num_gpu_blocks_override=5, max_model_len=256)
    broken = write_checkpoint(tmp_path / "broken", "qwen3")
    edit_config(broken, vocab_size=255)
    with pytest.raises(ValueError, match="of another shape"):
        LLM(str(broken), skip_tokenizer_init=True, device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("args", "field", "said"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size", "asks for 4 GPUs with all ranks, this machine has 3"),
        ({"tensor_parallel_size": 1, "data_parallel_size": 4}, "data_parallel_size", "asks for 4 GPUs"),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size", "asks for 4 GPUs"),
    ],
)
def test_more_ranks_than_gpus_are_refused_before_a_process_starts(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, args: dict[str, int], field: str, said: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(InvalidEngineConfig, match=said) as caught:
        make(device="cuda", **args)
    assert caught.value.field == field
