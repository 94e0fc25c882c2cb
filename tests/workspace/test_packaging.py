"""The workspace is one thing: equal versions, typed portions of one namespace, wheels that hold what they must."""

import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.cli.main import main

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def read(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def test_the_workspace_has_its_three_packages() -> None:
    assert [path.name for path in PACKAGES] == ["backend", "client", "types"]


def test_versions_python_range_and_licence_are_equal_everywhere() -> None:
    projects = [read(folder)["project"] for folder in [ROOT, *PACKAGES]]
    facts = {(project["version"], project["requires-python"], project["license"]) for project in projects}
    assert len(facts) == 1
    assert next(iter(facts))[1:] == (">=3.11,<3.14", "Apache-2.0")
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_packages_depend_on_each_other_by_their_exact_version() -> None:
    version = read(ROOT)["project"]["version"]
    found = [
        dependency
        for folder in PACKAGES
        for dependency in read(folder)["project"]["dependencies"]
        if dependency.startswith("tinker-local")
    ]
    assert found
    assert all(dependency.endswith(f"=={version}") for dependency in found), found


def test_the_extras_cpu_and_gpu_conflict_and_share_one_torch() -> None:
    uv = read(ROOT)["tool"]["uv"]
    conflicts = [{(item.get("package"), item["extra"]) for item in conflict} for conflict in uv["conflicts"]]
    assert {(None, "cpu"), (None, "gpu")} in conflicts
    assert {(None, "cpu"), ("tinker-local", "gpu")} in conflicts
    assert sum(entry.startswith("torch==") for entry in uv["override-dependencies"]) == 1


def test_each_package_says_what_it_is_for_whom_and_has_links() -> None:
    for folder in PACKAGES:
        project = read(folder)["project"]
        assert {"description", "readme", "keywords", "classifiers", "urls", "license-files"} <= set(project)
    assert f"## {read(ROOT)['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_each_package_is_a_typed_portion_of_the_namespace(folder: Path) -> None:
    module = read(folder)["tool"]["uv"]["build-backend"]["module-name"]
    portion = folder / "src" / Path(*module.split("."))
    assert (portion / "__init__.py").is_file()
    assert (portion / "py.typed").is_file()
    assert not (portion.parent / "__init__.py").exists()


def find_uv() -> str | None:
    private = ROOT / ".uv/bin/uv"
    return str(private) if private.exists() else shutil.which("uv")


@pytest.mark.skipif(find_uv() is None, reason="uv is neither on PATH nor in .uv/")
@pytest.mark.more
def test_wheels_hold_py_typed_and_no_init_of_the_namespace(tmp_path: Path) -> None:
    command = [str(find_uv()), "build", "--all-packages", "--offline", "--quiet", "--out-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    wheels = sorted(tmp_path.glob("*.whl"))
    assert len(wheels) == len(PACKAGES)
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        assert sum(name.endswith("/py.typed") for name in names) == 1, wheel.name
        assert "tinker_local/__init__.py" not in names, wheel.name
    pages = {path.name for path in (ROOT / "packages/backend/src/tinker_local/backend/hosting/console").iterdir()}
    (backend,) = (wheel for wheel in wheels if wheel.name.startswith("tinker_local-"))
    assert {f"tinker_local/backend/cli/requirements-{engine}.txt" for engine in ("cpu", "gpu")} <= set(
        zipfile.ZipFile(backend).namelist()
    )
    inside = "tinker_local/backend/hosting/console/"
    assert {
        name.removeprefix(inside) for name in zipfile.ZipFile(backend).namelist() if name.startswith(inside)
    } >= pages


def test_every_command_finds_the_data_folder_of_the_image() -> None:
    content = (ROOT / "Dockerfile").read_text()
    assert "VOLUME /data\n" in content
    with_folder = {
        name for name, command in main.commands.items() if any("--data-dir" in each.opts for each in command.params)
    }
    assert {"serve", "backup"} <= with_folder
    assert set(re.findall(r"TINKER_LOCAL_([A-Z]+)_DATA_DIR=/data\b", content)) == {name.upper() for name in with_folder}
