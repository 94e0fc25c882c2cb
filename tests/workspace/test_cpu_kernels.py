"""scripts/cpu_kernels.sh: each commit is tested with other kernels, and never with those that a processor lacks."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "cpu_kernels.sh"
OLD = {"MKL_CBWR=COMPATIBLE", "ATEN_CPU_CAPABILITY=default"}
AVX2 = {"ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2"}
AVX512 = {"ATEN_CPU_CAPABILITY=avx512", "ONEDNN_MAX_CPU_ISA=AVX512_CORE"}


def chosen(cpuinfo: Path, folder: Path, *commit: str) -> str:
    environment = {**os.environ, "CPUINFO": str(cpuinfo), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    done = subprocess.run(
        ["sh", str(SCRIPT), *commit], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.removesuffix("\n")


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        pytest.param("fpu sse sse2 avx", OLD, id="sse"),
        pytest.param("fpu sse2 avx fma avx2 avx512f_fake", OLD | AVX2, id="avx2"),
        pytest.param("avx2 fma avx512f avx512dq avx512cd avx512bw avx512vl", OLD | AVX2 | AVX512, id="avx512"),
        pytest.param("avx2 fma avx512f avx512dq avx512bw avx512vl amx_bf16", {"MKL_CBWR=COMPATIBLE"}, id="amx"),
    ],
)
def test_every_setting_that_a_processor_has_is_some_commits_and_no_other(
    flags: str, settings: set[str], tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nvmx flags\t: avx512f avx512bw avx512vl avx512dq\n" * 2)
    found = [chosen(cpuinfo, tmp_path, f"{commit:07x}{'e' * 33}") for commit in range(len(settings))]
    assert set(found) == settings
    assert len(found) == len(settings)


def test_without_git_the_first_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fma avx2\n")
    assert chosen(tmp_path / "cpuinfo", tmp_path) == "MKL_CBWR=COMPATIBLE"
