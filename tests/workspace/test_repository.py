"""What a newcomer reads and runs is there: documented commands exist, scripts run, no private place is named."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Written in two halves, so that this file does not hold what it looks for.
FORBIDDEN = ["/wo" + "rk/", "py" + "pi.org", "files.python" + "hosted.org"]


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listing.split("\0") if name]


def documented_targets(document: str) -> set[str]:
    """Targets of the `make` commands that stand in code: at the beginning of a line, or of back-quoted words."""
    return set(re.findall(r"(?:^ *|`)make ([a-z-]+)", (ROOT / document).read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_documented_make_commands_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    documented = documented_targets(document)
    assert documented, f"{document} names no make command"
    assert documented <= targets


def test_readme_names_setup_demo_and_test() -> None:
    assert {"demo", "test", "setup"} <= documented_targets("README.md")


@pytest.mark.parametrize("script", [".ci/run", "scripts/bootstrap.sh"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    shell = "bash" if path.read_text().splitlines()[0].endswith("bash") else "sh"
    subprocess.run([shell, "-n", str(path)], check=True)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_tracked_files_name_no_private_path_and_no_registry_host() -> None:
    files = tracked_files()
    assert ROOT / "Makefile" in files
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in files
        if path.name != "uv.lock" and path.is_file()
        for word in FORBIDDEN
        if word.encode() in path.read_bytes()
    ]
    assert found == []
