"""What `check` and the start say of a machine with GPUs: its driver, its compiler, its cards, its folders."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, heap
from tinker_local.backend.cli import check_command, check_gpus
from tinker_local.backend.cli.check_command import Finding, check_machine
from tinker_local.backend.cli.check_gpus import compiler_problem, cuda_of_driver, cuda_of_torch, driver_problem, unlike
from tinker_local.backend.kernel_caches import CACHES, FLASH_ATTENTION, keep_flash_attention, use_writable_caches

Findings = Callable[[], dict[str, Finding]]


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Findings:
    """On a machine with two GPUs of 64 GiB, by the answers that its driver would give."""
    versions = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"}
    monkeypatch.setattr(check_command, "_version", versions.get)
    monkeypatch.setattr(check_command, "_gpus", lambda: {0: (0, 2**36), 1: (0, 2**36)})
    monkeypatch.setattr(check_gpus, "cuda_of_torch", lambda: "13.0")
    monkeypatch.setattr(heap, "driver_of_gpus", lambda: "580.159.04")
    monkeypatch.setattr(check_gpus, "cuda_of_driver", lambda: 13000)
    monkeypatch.setattr(heap, "names_of_gpus", lambda: {0: "NVIDIA H100", 1: "NVIDIA H100"})

    def found() -> dict[str, Finding]:
        machine = check_machine(BackendOptions(data_dir=tmp_path), None, None, fake=False)
        return {each.what: each for each in machine if each.what in ("driver", "compiler", "GPUs")}

    return found


def test_nothing_is_said_of_gpus_that_are_as_they_should_be(findings: Findings) -> None:
    assert findings() == {}


def test_an_old_driver_is_a_problem_that_says_the_lowest(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "driver_of_gpus", lambda: "575.57.08")
    monkeypatch.setattr(check_gpus, "cuda_of_driver", lambda: 12090)
    found = findings()["driver"]
    assert (found.level, "\n" in found.text) == ("problem", False)
    assert "575.57.08 runs CUDA up to 12.9" in found.text
    assert "580.65.06 or newer" in found.text


@pytest.mark.parametrize(
    ("runs", "cuda", "fits"),
    [
        (13000, "13.0", True),
        (13000, "13.2", True),
        (12090, "13.0", False),
        (12020, "12.9", True),
        (11080, "12.4", False),
        (10000, "11.8", True),  # not known: the start will tell
        (0, "13.0", True),
        (12090, "", True),
    ],
)
def test_a_driver_runs_all_of_its_major_version(runs: int, cuda: str, fits: bool) -> None:
    assert (driver_problem("500.1", runs, cuda) is None) == fits


def test_a_machine_without_a_driver_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert cuda_of_driver() == 0


def test_a_gpu_that_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that fell off the bus, on a stand-in for NVIDIA's library."""

    class Silent(Exception):
        pass

    def answer(value: Any) -> Any:
        def of(gpu: int) -> Any:
            if gpu == 1:
                raise Silent
            return value

        return of

    def no_version() -> str:
        raise Silent

    nvml = SimpleNamespace(
        NVMLError=Silent,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda at: at,
        nvmlDeviceGetMemoryInfo=answer(SimpleNamespace(used=1, total=2)),
        nvmlDeviceGetName=answer("NVIDIA L4"),
        nvmlSystemGetDriverVersion=no_version,
    )
    monkeypatch.setattr(heap, "_nvml", lambda: nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert heap.memory_of_gpus() == {0: (1, 2), 2: (1, 2)}
    assert heap.names_of_gpus() == {0: "NVIDIA L4", 2: "NVIDIA L4"}
    assert heap.driver_of_gpus() == ""


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_of_driver(), reason="needs a CUDA device")
def test_free_memory_of_a_gpu_is_read_without_keeping_any() -> None:
    program = """
import torch
from tinker_local.backend.heap import free_on_gpu
before, total = free_on_gpu(0)
assert abs(free_on_gpu(0)[0] - before) < 2**28  # a context that stays would take half a gibibyte
with_context, as_torch_says = torch.cuda.mem_get_info(0)
assert total == as_torch_says, (total, as_torch_says)
assert abs(before - with_context) < 2**30, (before, with_context)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.more
def test_the_cuda_of_torch_is_read_without_importing_it() -> None:
    program = """
import sys
from tinker_local.backend.cli.check_gpus import cuda_of_torch
found = cuda_of_torch()
assert "torch" not in sys.modules
import torch
assert found == (torch.version.cuda or ""), found
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert cuda_of_torch() == cuda_of_torch()


def test_no_compiler_and_no_headers_are_said(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in findings()["compiler"].text
    monkeypatch.setenv("CC", "/opt/cc")
    assert compiler_problem() is None
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert f"{tmp_path}/Python.h is not there" in findings()["compiler"].text


def test_gpus_of_different_kinds_are_named(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "names_of_gpus", lambda: {0: "NVIDIA H100", 1: "NVIDIA RTX A6000"})
    found = findings()["GPUs"]
    assert (found.level, "\n" in found.text) == ("warning", False)
    assert "GPU 0 is a NVIDIA H100, GPU 1 is a NVIDIA RTX A6000" in found.text
    assert unlike({0: "NVIDIA L4"}) is None
    assert unlike({}) is None


def test_kernels_are_kept_in_the_data_folder_where_their_own_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file where a folder should be cannot be written by root either."""
    blocked = tmp_path / "a-file"
    blocked.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked / "triton"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "not" / "yet"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    said: list[str] = []
    use_writable_caches(tmp_path / "data", said.append)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "data" / "kernels" / "triton")
    assert os.environ["VLLM_CACHE_ROOT"] == str(tmp_path / "not" / "yet")
    assert said == [
        f"{blocked}/triton cannot be written (TRITON_CACHE_DIR): compiled kernels are kept in "
        f"{tmp_path}/data/kernels/triton"
    ]
    use_writable_caches(tmp_path / "data", said.append)
    assert len(said) == 1


@pytest.fixture
def no_caches_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache in CACHES:
        for variable in filter(None, (cache.variable, cache.root)):
            monkeypatch.setenv(variable, "")  # so that it is put back
            monkeypatch.delenv(variable)


@pytest.mark.usefixtures("no_caches_named")
def test_a_home_that_is_read_only_moves_all_caches_but_those_that_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/proc/1")  # a file system without new folders
    said: list[str] = []
    use_writable_caches(tmp_path, said.append)
    assert [os.environ[cache.variable] for cache in CACHES] == [
        str(tmp_path / "kernels" / name) for name in ("triton", "vllm", "flashinfer", "flash")
    ]
    assert len(said) == len(CACHES)
    for cache in CACHES:
        monkeypatch.delenv(cache.variable)
        if cache.root:
            monkeypatch.setenv(cache.root, str(tmp_path / "elsewhere"))
    use_writable_caches(tmp_path, said.append)
    assert [cache.variable for cache in CACHES if cache.variable in os.environ] == ["FLASHINFER_WORKSPACE_BASE"]


@pytest.mark.usefixtures("no_caches_named")
def test_somebody_without_a_home_keeps_kernels_in_the_data_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a container's user that /etc/passwd does not have, or one whose home is root's."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    said: list[str] = []
    use_writable_caches(tmp_path, said.append)
    assert said[0].startswith("~/.triton/cache cannot be written")
    assert len(said) == len(CACHES)


@pytest.mark.usefixtures("no_caches_named")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_home_that_may_not_be_searched_is_no_error(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".triton").mkdir(parents=True)
    home.chmod(0o700)
    program = f"""
import os
from pathlib import Path
from tinker_local.backend.kernel_caches import use_writable_caches
os.setuid(12345)
use_writable_caches(Path({str(tmp_path / "data")!r}), print)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "HOME": str(home)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot be written") == len(CACHES)


@pytest.mark.usefixtures("no_caches_named")
def test_flash_attention_keeps_its_kernels_beside_the_others_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    enabled = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    for given, kept in ((None, "1"), ("0", "0")):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv(enabled, "")
        if given is None:
            monkeypatch.delenv(enabled)
        else:
            monkeypatch.setenv(enabled, given)
        keep_flash_attention()
        assert os.environ[FLASH_ATTENTION.variable] == str(tmp_path / ".cache/flash_attention")
        assert os.environ[enabled] == kept
    monkeypatch.setenv(FLASH_ATTENTION.variable, "/elsewhere")
    keep_flash_attention()
    assert os.environ[FLASH_ATTENTION.variable] == "/elsewhere"
