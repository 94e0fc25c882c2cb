"""Refuse circles of imports between the folders of a package, and between its modules: `make check` runs it.

First each folder is a node, and so is each module beside the folders (`backend/options.py`); then each module. Every
import counts: at the top of a module, inside a function, under `TYPE_CHECKING`. What the `__init__` of a folder imports
is not counted for those who import another module of it.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

NAMESPACE = "tinker_local"
PACKAGES = Path(__file__).parents[1] / "packages"

Graph = dict[str, dict[str, str]]
"""For each node, the nodes that it imports, each with the place of one such import."""


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and dotted name of each import; for `from a import b` also `a.b`, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def folder_of(parts: Sequence[str], root: Path) -> str:
    """The node that holds a dotted name below the namespace. A name that is not a module belongs to `__init__`."""
    package, name = parts[0], parts[1] if len(parts) > 1 else "__init__"
    is_module = (root / package / name).is_dir() or (root / package / f"{name}.py").is_file()
    return f"{package}/{name if is_module else '__init__'}"


def module_of(parts: Sequence[str], root: Path) -> str:
    """The module that holds a dotted name below the namespace, the name itself or what it is taken from."""
    for length in range(len(parts), 1, -1):
        path = root.joinpath(*parts[:length])
        if path.with_suffix(".py").is_file():
            return "/".join(parts[:length])
        if (path / "__init__.py").is_file():
            return "/".join([*parts[:length], "__init__"])
    return f"{parts[0]}/__init__"


def imports(packages: Path, node_of: Callable[[Sequence[str], Path], str] = folder_of) -> Graph:
    """Which node imports which, for all packages below `packages`."""
    graph: Graph = {}
    for root in sorted(packages.glob(f"*/src/{NAMESPACE}")):
        for path in sorted(root.rglob("*.py")):
            here = node_of(path.relative_to(root).with_suffix("").parts, root)
            found = graph.setdefault(here, {})
            for line, name in imported(ast.parse(path.read_text())):
                first, *rest = name.split(".")
                if first != NAMESPACE or not (root / rest[0]).is_dir():
                    continue  # another distribution: packages depend on each other one way, by their pyproject.toml
                if (there := node_of(rest, root)) != here:
                    found.setdefault(there, f"{path.relative_to(root)}:{line}")
    return graph


def circle(graph: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The places whose imports make a circle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        round_trip = list(reversed(error.args[1]))
        return [f"{graph[a][b]}: {a} imports {b}" for a, b in pairwise(round_trip)]
    return []


if __name__ == "__main__":
    for node_of in (folder_of, module_of):
        if found := circle(imports(PACKAGES, node_of)):
            print("these imports make a circle:", *found, sep="\n  ")
            sys.exit(1)
