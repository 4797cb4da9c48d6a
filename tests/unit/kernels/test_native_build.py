"""Building, caching and loading the C++ kernels, and the fallback if that is impossible."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baton.kernels.native import build

pytestmark = pytest.mark.exhaustive

SCRIPT_TIMEOUT_S = 100


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a source folder with one function and an empty cache. Return the source folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(build, "SOURCE_FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SCRIPT_TIMEOUT_S,
        check=True,
    )


def test_a_library_is_built_once(small_library: Path) -> None:
    path = build.library_path()
    built = path.stat().st_mtime_ns
    assert build.library_path() == path
    assert path.stat().st_mtime_ns == built


def test_a_changed_source_is_another_library(small_library: Path) -> None:
    before = build.library_path()
    (small_library / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert build.library_path() != before


def test_builders_that_race_leave_one_whole_library(small_library: Path) -> None:
    paths: list[Path] = []
    racers = [threading.Thread(target=lambda: paths.append(build.library_path())) for _ in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert len(set(paths)) == 1
    assert list(paths[0].parent.iterdir()) == [paths[0]], "a build left temporary files behind"


def test_a_source_that_does_not_compile_is_reported_with_the_compilers_message(small_library: Path) -> None:
    (small_library / "broken.cpp").write_text("int broken( { }\n")
    with pytest.raises(build.NativeBuildError, match=r"broken\.cpp"):
        build.library_path()
    assert list(build.cache_folder().iterdir()) == []


def test_a_full_disk_is_a_build_that_failed(small_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.os, "replace", fail)
    with pytest.raises(build.NativeBuildError, match=r"cannot be built in .*No space left"):
        build.library_path()


def test_a_missing_compiler_is_named(small_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.NativeBuildError, match=r"install g\+\+"):
        build.library_path()


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_folder(
    small_library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert build.library_path().exists()
    assert build.cache_folder().stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_the_private_folder_is_deleted_when_its_process_ends(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    code = "from baton.kernels.native import build; print(build.cache_folder()); assert build.cache_folder().is_dir()"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "a file")}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S, check=True)
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("baton-native-")
    assert not folder.exists()


@pytest.mark.slow
def test_without_a_compiler_the_references_serve_after_one_warning(tmp_path: Path) -> None:
    code = """
import logging, torch
logging.basicConfig(format="LOG %(name)s %(levelname)s")
from baton.kernels import native
from baton.kernels.linear import linear, pack
from baton.kernels.rms_norm import reference, rms_norm
from baton.kernels.activation import Activation, activation_and_mul
x, weight = torch.randn(3, 32), torch.randn(32)
assert torch.equal(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
packed = pack(torch.randn(8, 32).bfloat16())
assert not packed.in_panels and linear(x.bfloat16(), packed).shape == (3, 8)
assert activation_and_mul(x, Activation.SILU).shape == (3, 16)
try:
    native.prepare()
except native.NativeBuildError as error:
    print("REFUSED", error)
"""
    result = run_python(code, PATH="", XDG_CACHE_HOME=str(tmp_path))
    assert result.stderr.count("LOG baton.kernels.native WARNING") == 1
    assert "REFUSED no C++ compiler" in result.stdout


@pytest.mark.slow
def test_torch_and_the_kernels_share_one_openmp_runtime_and_its_threads() -> None:
    code = """
import os, torch
from baton.kernels import native
from baton.kernels.activation import Activation, activation_and_mul
torch.set_num_threads(3)
torch.randn(1000, 1000).add_(1).sum()
before = len(os.listdir("/proc/self/task"))
native.prepare()
activation_and_mul(torch.randn(1000, 2000), Activation.SILU)
torch.randn(1000, 1000).add_(1).sum()
assert len(os.listdir("/proc/self/task")) == before, "the kernels started threads of their own"
code = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line and " r-xp " in line}
assert len(code) == 1, code
"""
    run_python(code, OMP_NUM_THREADS="3")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-march=x86-64-v3",), ("-march=native", "-mno-amx-tile")], ids=["AVX2", "no AMX"])
def test_older_instructions_give_the_same_results(flags: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    """Code paths without AMX and AVX-512 are right, too: the ops' tests pass with a library built for such a CPU."""
    folder, chosen = Path(__file__).parent, request.config.option.slice or "1/1"
    code = f"""
import sys, pytest
from baton.kernels.native import build
build.COMPILE_FLAGS = (*(flag for flag in build.COMPILE_FLAGS if flag != "-march=native"), *{flags})
files = [f"{folder}/test_{{op}}.py" for op in ("attention", "linear", "rope_kv", "activation")]
tests = "ratio or multiple_of_16_dim or cut or normalised or number_of_tokens or number_of_rows"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--slice", "{chosen}", "-k", tests, *files]))
"""
    run_python(code, XDG_CACHE_HOME=str(folder.parents[2] / "build"))  # one build until a source changes


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names CPUs of another architecture")
@pytest.mark.parametrize("cpu", ["x86-64", "haswell", "skylake-avx512", "sapphirerapids"])
def test_the_sources_compile_for_other_cpus(cpu: str) -> None:
    """A CPU's vector width decides which code is compiled. A compile error would make its users run the references."""
    flags = [flag for flag in build.COMPILE_FLAGS if not flag.startswith(("-march", "-O"))]
    for source in sorted(build.SOURCE_FOLDER.glob("*.cpp")):
        command = ["g++", *flags, f"-march={cpu}", "-fsyntax-only", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S)
        assert done.returncode == 0, f"{source.name}: {done.stderr}"
