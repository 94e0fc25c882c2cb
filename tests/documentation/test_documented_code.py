"""Code and links of README and of the site's tutorials: options exist, Python compiles, imported names are there."""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from tinker_local.backend.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = ["first-ten-minutes", "your-own-pictures", "rl-with-images", "cookbook", "for-a-team"]
PAGES = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in TUTORIALS)]


class Block(NamedTuple):
    """A block of code: `language` of its fence (`sh` where it is indented), and its text."""

    page: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    fenced = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [Block(page.name, match[1], match[2]) for match in fenced.finditer(text)]
    indented = re.findall(r"(?:^ {4}.*\n)+", fenced.sub("", text), re.MULTILINE)
    return found + [Block(page.name, "sh", re.sub("^ {4}", "", block, flags=re.MULTILINE)) for block in indented]


def commands(text: str) -> list[list[str]]:
    """The words of each line of a shell block; of a pipe, each part."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if "$(" not in line]
    words = [shlex.split(part, comments=True) for line in lines for part in re.split(r" \| | && ", line)]
    return [each for each in words if each and not each[0].endswith(("]", "..."))]


def command_problem(words: list[str]) -> str | None:
    """What is wrong with a command of `tinker-local`, `make` or an example; None if it could run."""
    program = words[0].rpartition("/")[2]
    if program == "tinker-local" and len(words) > 1 and not words[1].startswith("-"):
        command = main.get_command(click.Context(main), words[1])
        if command is None:
            return f"no command {words[1]}"
        try:
            command.make_parser(click.Context(command)).parse_args(words[2:])
        except click.UsageError as error:
            return error.format_message()
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return next((f"no target {word}" for word in words[1:] if "=" not in word and word not in targets), None)
    if program == "python" and len(words) > 1 and words[1].startswith("examples/"):
        if not (ROOT / words[1]).is_file():
            return f"{words[1]} does not exist"
        source = "".join((ROOT / path).read_text() for path in (words[1], "examples/saving.py", "examples/grpo.py"))
        return next((f"no option {word}" for word in words[2:] if word[:2] == "--" and f'"{word}"' not in source), None)
    return None


def python_problem(text: str) -> str | None:
    """What does not compile or cannot be imported."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            missing = [
                name.name
                for name in node.names
                if not hasattr(module, name.name) and not find_spec(f"{node.module}.{name.name}")
            ]
            if missing:
                return f"{node.module} has no {missing}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_commands_and_imports_exist(page: Path) -> None:
    found = blocks(page)
    assert found
    problems = [
        f"{block.page}: {shlex.join(words)}: {problem}"
        for block in found
        if block.language == "sh"
        for words in commands(block.text)
        if (problem := command_problem(words))
    ]
    problems += [
        f"{block.page}: {problem}"
        for block in found
        if block.language == "python" and (problem := python_problem(block.text))
    ]
    assert problems == []


@pytest.mark.parametrize(
    "words",
    [
        ["tinker-local", "serve", "--no-such"],
        ["tinker-local", "serf"],
        ["make", "dmo"],
        [".venv/bin/python", "examples/none.py"],
        [".venv/bin/python", "examples/vlm_classifier.py", "--colour"],
    ],
)
def test_commands_that_do_not_exist_are_found(words: list[str]) -> None:
    assert command_problem(words)


def test_an_import_that_does_not_exist_is_found() -> None:
    assert python_problem("from tinker_local.types import no_such_name")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md"])
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    missing = [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()]
    assert missing == []


def test_the_navigation_has_every_page_once() -> None:
    def pages(entries: Any) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        values = entries.values() if isinstance(entries, dict) else entries
        return [page for entry in values for page in pages(entry)]

    listed = pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Broken links are errors; a page may link to other hosts, but loads no script, style or picture from them."""
    (tmp_path / "zensical.toml").write_text((ROOT / "zensical.toml").read_text())
    shutil.copytree(DOCS, tmp_path / "docs")
    (tmp_path / "packages").symlink_to(ROOT / "packages")
    program = ROOT / ".venv" / "bin" / "zensical"
    if not program.exists():
        pytest.skip("zensical is not installed")
    done = subprocess.run([program, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "griffe:" not in said
    html = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(html) > 20
    loaded = [
        link for text in html for link in re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(http[^\" >]+)", text)
    ]
    assert loaded == []
