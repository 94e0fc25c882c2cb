"""What no line of the packages may do: read a pickle, make an event loop on the way of a request, import vLLM outside
its folder, or use a phrase that readers stumble over."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PICKLES = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Modules that run what they read."""

BETWEEN_OWN_PROCESSES = {
    "backend/process/messages.py",
    "backend/vllm_engine/grammar_process.py",
    "backend/vllm_engine/grammar_server.py",
}
"""Each reads what a process that it started, or that started it, writes, over a socket that only the two have."""

OTHER_READERS = {"torch.load", "torch.save", "np.load", "numpy.load"}
EVENT_LOOPS = {"asyncio.run", "asyncio.Runner", "asyncio.new_event_loop", "uvloop.new_event_loop"}
BEGINNINGS = {
    "backend/cli/serve.py",
    "backend/hosting/server.py",
    "backend/process/async_child.py",
    "backend/report/make_report.py",
    "client/train/media.py",
}
"""Where a process or a thread of the server begins, and where the client fetches a picture in a thread for it."""


VLLM_FOLDER = "backend/vllm_engine/"
"""The only code that imports vLLM."""


STUMBLES = re.compile(
    r"\b(nobody|whoever|lest|is told|of (its|their) own|one behind the other|who samples|be it|as far as|it is they)\b"
    r"|(?<!\bthere )\b(is|are) no (?!longer\b|more\b)",
    re.IGNORECASE,
)
"""Rare in good technical English; subject, verb and object say the same."""

FOLDERS = ("benchmarks", "docs", "examples", "packages", "scripts", "tests")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Each module of the packages, by its path below the namespace."""
    for path in sorted(ROOT.glob("packages/*/src/tinker_local/**/*.py")):
        yield path.as_posix().split("/src/tinker_local/")[1], ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    """The first names of what a module imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def named(tree: ast.Module) -> set[str]:
    """The first names of modules that `import_module("...")` is called with."""
    return {
        node.args[0].value.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and (node.func.id if isinstance(node.func, ast.Name) else node.func.attr) in ("import_module", "__import__")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def dotted(tree: ast.Module) -> set[str]:
    """What a module refers to as `name.attribute`."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def test_nothing_reads_or_writes_pickles() -> None:
    found = {path for path, tree in sources() if imported(tree) & PICKLES or dotted(tree) & OTHER_READERS}
    assert found <= BETWEEN_OWN_PROCESSES


def test_event_loops_are_made_where_a_server_begins_and_nowhere_else() -> None:
    assert {path for path, tree in sources() if dotted(tree) & EVENT_LOOPS} <= BEGINNINGS


def test_only_the_folder_for_it_imports_vllm() -> None:
    """Imports inside functions and of modules by name included."""
    found = {path for path, tree in sources() if "vllm" in imported(tree) | named(tree)}
    assert found, "the rule finds no import at all"
    assert {path for path in found if not path.startswith(VLLM_FOLDER)} == set()


def stumbles(path: Path) -> list[str]:
    """Each phrase of STUMBLES in a file with the words before it; a phrase may be broken over two lines."""
    words = re.sub(r"[\s#>]+", " ", path.read_text())
    return [f"{path}: ...{words[max(0, each.start() - 40) : each.end()]}" for each in STUMBLES.finditer(words)]


def test_prose_is_plain() -> None:
    files = [*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]
    prose = [file for file in files if file.suffix in (".md", ".py", ".sh") and file != Path(__file__)]
    assert len(prose) > 300
    assert [line for file in prose for line in stumbles(file)] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("so that nobody\n    waits for it", 1),
        ("# Whoever asks gets\n# it. This is\n# no text.", 2),
        ("has a thread of its own", 1),
        ("There is no checkpoint; it is no longer there, and there\n    are no files", 0),
        ("the file is not text; keep it as long as you like", 0),
    ],
)
def test_phrases_that_readers_stumble_over_are_found(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "page.md").write_text(text)
    assert len(stumbles(tmp_path / "page.md")) == count


def test_names_of_python_files_are_unique_and_so_tell_what_is_inside() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    by_name: dict[str, list[str]] = {}
    for path in paths:
        if path.name not in ("__init__.py", "__main__.py", "conftest.py"):
            by_name.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert len(by_name) > 300
    assert not {name: found for name, found in by_name.items() if len(found) > 1}


def defined(module: str) -> set[str] | None:
    """All names that a module of the packages defines or imports, and of a folder its modules too; None if there is no
    such module."""
    for source in (ROOT / "packages").glob("*/src"):
        path = source.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            nodes = ast.walk(ast.parse(file.read_text()))
            names = {name for node in nodes for name in bound(node)}
            return names | ({each.stem for each in path.glob("*")} if path.is_dir() else set())
    return None


def bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.alias):
        yield node.asname or node.name


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts"])
def test_what_programs_import_of_the_packages_is_there(folder: str) -> None:
    """mypy does not look at them."""
    missing = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tinker_local."):
                lacking = {each.name for each in node.names} - (defined(node.module) or set())
                missing += [f"{file.name}: {node.module}.{name}" for name in sorted(lacking)]
    assert missing == []
