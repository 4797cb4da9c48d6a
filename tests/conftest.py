"""Settings of all tests of a run, made before anything reads them.

One thread a process: several Ray workers and tests share few cores, and OpenMP teams that spin starve each other. Where
there is no GPU, Triton interprets kernels on CPU tensors.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from .helpers.process_state import changes, module_state, process_state, replaced_names, seed_randomness
from .helpers.slices import Slice

if TYPE_CHECKING:
    from .helpers.member_pool import MemberPool

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # as `baton serve` sets it: with Ray's 15, other tests come first
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; processes of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


# A machine that does something else meanwhile is no failure; Hypothesis has it like that where `CI` is set.
if not os.environ.get("CI"):
    hypothesis.settings.register_profile("busy machine", deadline=None)
    hypothesis.settings.load_profile("busy machine")

# Files whose tests start clusters: a machine has room for one of its own, and for one on hosts made of namespaces.
ON_THIS_MACHINE = ("tests/cluster/",)
ON_HOSTS = ("tests/chaos/test_chaos_on_hosts.py", "tests/hosts/test_hosts.py", "tests/hosts/test_ray_up.py")


class Files(LoadFileScheduling):
    """Several workers (`pytest -n auto --dist loadfile --no-loadscope-reorder`) take a file each, in this order:

    those that start clusters here    one worker's, one after the other; the others run everything else meanwhile
    those with slow tests
    those that make hosts             one worker's, one after the other, mostly when clusters here have ended
    all others, those with the most tests first: with them all workers end at about the same time

    By name, as the process that hands out files knows no marks, and xdist's groups are lost with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith(ON_THIS_MACHINE):
            return "clusters"
        return "hosts" if file.startswith(ON_HOSTS) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Files | None:
    return Files(config, log) if config.option.dist == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="NUMBER/COUNT", help="which of the tests marked `exhaustive` run: else all")


def pytest_report_header(config: pytest.Config) -> str | None:
    chosen = config.option.slice
    return f"slice {chosen} of the tests marked `exhaustive`: SLICE={chosen} repeats it" if chosen else None


@pytest.hookimpl(trylast=True)  # when `-m` and `-k` have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        must = item.get_closest_marker("cluster") or "machine_with_hosts" in item.fixturenames
        if must and not item.nodeid.startswith((*ON_THIS_MACHINE, *ON_HOSTS)):
            raise pytest.UsageError(f"{item.nodeid} starts a cluster or hosts: tests/conftest.py must name its file")
    if config.option.slice:
        _keep_slice(config, items)
    if hasattr(config, "workerinput"):
        sizes = Counter(item.path for item in items)
        slow = {item.path for item in items if item.get_closest_marker("slow")}

        def order(item: pytest.Item) -> tuple[int, int, Path]:
            here, on_hosts = (item.nodeid.startswith(files) for files in (ON_THIS_MACHINE, ON_HOSTS))
            turn = 0 if here else 2 if on_hosts else 1 if item.path in slow else 3
            return turn, 0 if here else -sizes[item.path], item.path  # in order of names, as two files share a server

        items.sort(key=order)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking again and again at modules and tests: half a second of a core a time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else libraries call what they find at exit leaked


def _keep_slice(config: pytest.Config, items: list[pytest.Item]) -> None:
    exhaustive = [item.nodeid for item in items if item.get_closest_marker("exhaustive")]
    try:
        left_out = set(exhaustive) - Slice.parse(config.option.slice).of(exhaustive)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = max((marker.args[0] if marker.args else 1 for marker in item.iter_markers("gpu")), default=0)
    if needed:
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < needed:
            pytest.skip("needs a CUDA device" if needed == 1 else f"needs {needed} CUDA devices, there are {found}")


@pytest.fixture(autouse=True, scope="module")
def module_leaves_the_process_as_it_was() -> Iterator[None]:
    """Fail where the fixtures of a module, or its tests, leave something changed that later ones meet."""
    before, modules = process_state(), module_state()
    yield
    if left := changes(before, process_state()) + replaced_names(modules):
        pytest.fail("the module leaves this process changed: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was(module_leaves_the_process_as_it_was: None) -> Iterator[None]:
    """Begin with the same random numbers, and fail where a test leaves something changed that later ones meet."""
    seed_randomness()
    before = process_state()
    yield
    if left := changes(before, process_state()):
        pytest.fail("the test leaves this process changed: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="module")
def pool() -> Iterator[MemberPool]:
    """Processes that are members of groups; see `member_pool`."""
    from .helpers.member_pool import MemberPool

    pool = MemberPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def machine_with_hosts() -> None:
    """Skips where this machine cannot make hosts (`hosts/hosts.py`); continuous integration must not."""
    from .hosts.hosts import missing_here

    if why := missing_here():
        if os.environ.get("CI"):
            pytest.fail(f"continuous integration must not leave this out: {why}")
        pytest.skip(why)
