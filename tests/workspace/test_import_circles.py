"""`scripts/import_circles.py`, which `make check` runs: it finds a circle wherever the imports stand."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from import_circles import circle, imports, module_of  # noqa: E402

DOWN = "from tinker_local.backend.lower.part import thing\n"
UP = "from tinker_local.backend.upper.part import thing\n"


def packages(folder: Path, **modules: str) -> Path:
    """A tree with `backend/upper/part.py`, `backend/lower/part.py` and `backend/single.py`."""
    for name, text in modules.items():
        path = (
            folder
            / "backend/src/tinker_local/backend"
            / f"{name if name == '__init__' else name.replace('__', '/')}.py"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "upwards",
    [
        UP,
        f"def later():\n    {UP}",
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {UP}",
        "import tinker_local.backend.upper.part\n",
        "from tinker_local.backend import upper\n",
    ],
)
def test_circle_of_two_folders_is_found_wherever_the_import_stands(tmp_path: Path, upwards: str) -> None:
    assert circle(imports(packages(tmp_path, upper__part=DOWN, lower__part="thing = 1\n"))) == []
    found = circle(imports(packages(tmp_path, upper__part=DOWN, lower__part=upwards)))
    assert len(found) == 2
    assert any(line.endswith("backend/lower imports backend/upper") for line in found)


def test_circle_through_a_single_module_and_the_packages_names_is_found(tmp_path: Path) -> None:
    part = "from tinker_local.backend import Public\n"
    init = "from tinker_local.backend.single import Public\n"
    single = "def later():\n    from tinker_local.backend.lower.part import thing\n"
    assert len(circle(imports(packages(tmp_path, __init__=init, single=single, lower__part=part)))) == 3


def test_circle_of_two_modules_of_one_folder_is_found(tmp_path: Path) -> None:
    other = "from tinker_local.backend.lower.part import thing\n"
    tree = packages(tmp_path, lower__part="def f():\n    import tinker_local.backend.lower.other\n", lower__other=other)
    assert circle(imports(tree)) == []
    assert len(circle(imports(tree, module_of))) == 2
    (tree / "backend/src/tinker_local/backend/lower/part.py").write_text("thing = 1\n")
    assert circle(imports(tree, module_of)) == []


def test_make_check_ends_with_the_lines_of_a_circle(tmp_path: Path) -> None:
    """As `make check` runs it, on a copy of the script beside a tree that has one."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts/import_circles.py"
    script.write_text((ROOT / "scripts/import_circles.py").read_text())
    packages(tmp_path / "packages", upper__part=DOWN, lower__part=UP)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "backend/upper/part.py:1: backend/upper imports backend/lower" in done.stdout
    assert "$(BIN)/python scripts/import_circles.py" in (ROOT / "Makefile").read_text()


def test_imports_go_down_the_list_in_contributing() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().split("each line may import those below it.")[1].split("```")[1]
    order = [f"backend/{line.split()[0].removesuffix('/').removesuffix('.py')}" for line in text.strip().splitlines()]
    graph = imports(ROOT / "packages")
    assert set(order) <= graph.keys()
    upwards = [
        f"{place}: {above} imports {below}"
        for above, found in graph.items()
        for below, place in found.items()
        if above in order and below in order and order.index(above) >= order.index(below)
    ]
    assert upwards == []
    folders = {path.name for path in (ROOT / "packages/backend/src/tinker_local/backend").iterdir() if path.is_dir()}
    assert folders - {"tiny_models", "__pycache__"} <= {node.removeprefix("backend/") for node in order}


def test_the_core_does_not_import_hosting() -> None:
    """Modules beside the folders count as well, those that the list in CONTRIBUTING leaves out included."""
    graph = imports(ROOT / "packages")
    importers = {node: found["backend/hosting"] for node, found in graph.items() if "backend/hosting" in found}
    core = {node: place for node, place in importers.items() if node not in ("backend/cli", "backend/backend")}
    assert core == {}
