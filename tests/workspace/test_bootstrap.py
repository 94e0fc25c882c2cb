"""scripts/bootstrap.sh: says what is missing, chooses the extra, and syncs only when there is a reason to."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
TOOLS = ["sh", "uname", "dirname", "grep", "sed", "cut", "sort", "head", "cat", "sha256sum", "mkdir", "rm", "chmod"]

FAKE_UV = """#!/bin/sh
if [ "$1" = --version ]; then echo "uv {version}"; exit 0; fi
echo "$@" >>calls
mkdir -p .venv/bin
printf '#!/bin/sh\\nexit {python_exit}\\n' >.venv/bin/python
chmod +x .venv/bin/python
"""


class Clone:
    """A copy of what the script reads, with a PATH that holds only the tools a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        (folder / "scripts").mkdir()
        (folder / "packages/types").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / "scripts/bootstrap.sh", folder / "scripts")
        for name in ["uv.lock", "pyproject.toml", "packages/types/pyproject.toml"]:
            (folder / name).write_text(name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def fake_uv(self, version: str = "0.13.8", python_exit: int = 0) -> None:
        self.program("uv", FAKE_UV.format(version=version, python_exit=python_exit))

    def run(self, extra: str = "cpu") -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "EXTRA": extra}
        command = ["sh", "scripts/bootstrap.sh"]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=280)

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_without_uv_and_python_the_packages_to_install_are_named(clone: Clone) -> None:
    result = clone.run()
    assert result.returncode == 1
    assert "apt-get install python3 python3-venv" in result.stderr


def test_a_python_without_venv_names_python3_venv_and_leaves_nothing_behind(clone: Clone) -> None:
    clone.program("python3", "#!/bin/sh\nexit 1\n")
    result = clone.run()
    assert result.returncode == 1
    assert "apt-get install python3-venv" in result.stderr
    assert not (clone.folder / ".uv").exists()


def test_an_unknown_extra_is_refused(clone: Clone) -> None:
    clone.fake_uv()
    result = clone.run(extra="tpu")
    assert result.returncode == 1
    assert "'tpu'" in result.stderr
    assert clone.calls() == []


def test_a_fake_uv_syncs_from_the_lock_once_and_again_when_the_lock_changes(clone: Clone) -> None:
    clone.fake_uv()
    assert clone.run().returncode == 0
    assert clone.run().returncode == 0
    assert clone.calls() == ["sync --locked --extra cpu"]
    (clone.folder / "uv.lock").write_text("changed")
    assert clone.run().returncode == 0
    assert len(clone.calls()) == 2


def test_a_fake_uv_syncs_again_when_the_extra_changes(clone: Clone) -> None:
    clone.fake_uv()
    clone.run("cpu")
    clone.run("gpu")
    assert clone.calls() == ["sync --locked --extra cpu", "sync --locked --extra gpu"]


def test_a_listed_gpu_chooses_the_gpu_extra_with_a_fake_uv(clone: Clone) -> None:
    clone.fake_uv()
    clone.program("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H200'\n")
    assert clone.run(extra="").returncode == 0
    assert clone.calls() == ["sync --locked --extra gpu"]


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_no_gpu_chooses_the_cpu_extra_with_a_fake_uv(clone: Clone) -> None:
    clone.fake_uv()
    assert clone.run(extra="").returncode == 0
    assert clone.calls() == ["sync --locked --extra cpu"]


def test_a_fake_uv_that_is_too_old_is_passed_over(clone: Clone) -> None:
    clone.fake_uv(version="0.8.9")
    result = clone.run()
    assert result.returncode == 1
    assert "python3" in result.stderr
    assert clone.calls() == []


def test_missing_libnuma_is_named_and_the_fake_environment_is_not_called_ready(clone: Clone) -> None:
    clone.fake_uv(python_exit=1)
    result = clone.run()
    assert result.returncode == 1
    assert "apt-get install libnuma1" in result.stderr
    assert not (clone.folder / ".venv/bootstrap-stamp").exists()
