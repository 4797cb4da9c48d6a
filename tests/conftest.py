"""Settings for every test run, made before any module reads them.

Each process uses one thread: several Ray workers and tests share few cores, and spinning OpenMP teams would starve
each other. Without a GPU, Triton interprets kernels on CPU tensors.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from .helpers.process_state import changes, module_state, process_state, replaced_names, seed_randomness
from .helpers.slices import Slice

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

    from .helpers.member_pool import MemberPool

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # as `baton serve` sets it; Ray's 15 would put its processes last
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; child processes inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


# A test must not fail because the machine is busy; Hypothesis has these settings where `CI` is set.
if not os.environ.get("CI"):
    hypothesis.settings.register_profile("busy machine", deadline=None)
    hypothesis.settings.load_profile("busy machine")

# Files whose tests start Ray clusters: a machine can hold one local cluster, and one on hosts made of namespaces.
ON_THIS_MACHINE = ("tests/cluster/",)
ON_HOSTS = ("tests/chaos/test_chaos_on_hosts.py", "tests/hosts/test_hosts.py", "tests/hosts/test_ray_up.py")


class Files(LoadFileScheduling):
    """Order of test files: with `pytest -n auto --dist loadfile --no-loadscope-reorder` each worker takes the next one.

    files that start clusters here    one worker runs them one after the other; the others run everything else meanwhile
    files with slow tests
    files that make hosts             one worker runs them one after the other, mostly after the files with clusters
    all others, most tests first      so that all workers end at about the same time

    Files are recognized by name: the process that hands them out knows no marks, and pytest 9 loses xdist's groups.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith(ON_THIS_MACHINE):
            return "clusters"
        return "hosts" if file.startswith(ON_HOSTS) else file

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that a process ended in, if it did: it failed, and no other process runs it again."""
        unfinished = [(scope, test) for scope in self.assigned_work[node].values() for test in scope if not scope[test]]
        if not unfinished:
            return super().remove_node(node)
        scope, crashed = unfinished[0]
        scope[crashed] = True
        super().remove_node(node)
        return crashed


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Files | None:
    return Files(config, log) if config.option.dist == "loadfile" else None


class FailuresAtOnce:
    """Name a failed test when it fails: the report at the end is lost if the run is ended from outside."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)  # behind the letter that the terminal reporter prints
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash else str(report.longrepr)).strip()
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {message[:500]}")


# A test whose own limit has ended it has no limit any more. `faulthandler_timeout` does not end its fixtures either.
FIXTURES_END_S = 300.0
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # before tests are captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """End the process if the test's fixtures do not end, after printing where its threads are."""
    faulthandler.dump_traceback_later(FIXTURES_END_S, exit=True, file=item.config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(FailuresAtOnce(terminal))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", metavar="NUMBER/COUNT", help="which of the tests marked `exhaustive` run: else all")


def pytest_report_header(config: pytest.Config) -> str | None:
    chosen = config.option.slice
    return f"slice {chosen} of the tests marked `exhaustive`: SLICE={chosen} repeats it" if chosen else None


@pytest.hookimpl(trylast=True)  # after `-m` and `-k` have chosen
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
    """Exempt modules and tests from garbage collection: each pass over them would take half a second of CPU time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # otherwise libraries report what they find at exit as leaked


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
    """Fail if a module's fixtures or tests leave process state changed for later modules."""
    before, modules = process_state(), module_state()
    yield
    if left := changes(before, process_state()) + replaced_names(modules):
        pytest.fail("the module leaves this process changed: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was(module_leaves_the_process_as_it_was: None) -> Iterator[None]:
    """Seed the random generators, and fail if a test leaves process state changed for later tests."""
    seed_randomness()
    before = process_state()
    yield
    if left := changes(before, process_state()):
        pytest.fail("the test leaves this process changed: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="module")
def pool() -> Iterator[MemberPool]:
    """Return the pool of processes that act as members of groups; see `member_pool`."""
    from .helpers.member_pool import MemberPool

    pool = MemberPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def machine_with_hosts() -> None:
    """Skip where this machine cannot make hosts (`hosts/hosts.py`); in continuous integration, fail instead."""
    from .hosts.hosts import missing_here

    if why := missing_here():
        if os.environ.get("CI"):
            pytest.fail(f"continuous integration must not leave this out: {why}")
        pytest.skip(why)
