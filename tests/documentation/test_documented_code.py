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
from typing import Any

import click
import pytest
from tinker_local.backend.cli.main import main
from tinker_local.backend.cli.serve import serve

from tests.documentation.pages import DOCS, PAGES, ROOT, RUN, RUN_ELSEWHERE, Block, blocks, indented

pytestmark = pytest.mark.more


def commands(text: str) -> list[list[str]]:
    """The words of each line of a shell block; of a pipe, each part."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if "$(" not in line]
    lines = [re.sub(r"^(?:ExecStart=|(?:[A-Z_]+=\S+ )+)", "", line) for line in lines]
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
        source += '"--model" "--steps"' if "mo.cli_args()" in source else ""
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


def problems(block: Block) -> list[str]:
    """What a reader could not run in a block, by its syntax and by the names that it uses."""
    found: list[str | None]
    if block.language == "python":
        found = [python_problem(block.text)]
    elif block.language == "sh":
        found = [
            problem and f"{shlex.join(words)}: {problem}"
            for words in commands(block.text)
            for problem in [command_problem(words)]
        ]
    elif block.language == "ini":
        started = re.findall(r"^ExecStart=(?:.*\\\n)*.*", block.text, re.MULTILINE)
        found = [command_problem(words) for line in started for words in commands(line)]
    elif block.language == "toml":
        known = {option.removeprefix("--") for each in serve.params for option in each.opts}
        found = [f"serve has no option {name}" for name in tomllib.loads(block.text) if name not in known]
    else:
        found = []
    return [f"{block.page.name}, line {block.line}: {problem}" for problem in found if problem]


TAKEN = re.compile(r"create_(lora_)?training_client\w*")


def not_taken(text: str) -> list[str]:
    """Calls that make a training client in Python code, without `.result()` or `await`."""
    calls, taken = {}, set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if TAKEN.fullmatch(node.func.attr):
                calls[id(node)] = f"{node.func.attr}, line {node.lineno}"
            if node.func.attr == "result":
                taken.add(id(node.func.value))
        if isinstance(node, ast.Await):
            taken.add(id(node.value))
    return [words for call, words in calls.items() if call not in taken]


def test_no_example_makes_a_training_client_without_taking_it() -> None:
    """The SDK can wait for itself for ever then: docs/futures-and-exports.md."""
    code = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "examples").rglob("*.py")}
    code |= {f"{b.page.name}, {b.line}": b.text for page in PAGES for b in blocks(page) if b.language == "python"}
    assert sum(len(TAKEN.findall(text)) for text in code.values()) > 5
    assert {place: found for place, text in code.items() if (found := not_taken(text))} == {}
    assert not_taken("a = s.create_lora_training_client(1)\nb = await s.create_training_client_from_state(2)") == [
        "create_lora_training_client, line 1"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_commands_and_imports_exist(page: Path) -> None:
    assert [problem for block in blocks(page) for problem in problems(block)] == []
    assert [problem for text in indented(page) for words in commands(text) if (problem := command_problem(words))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_in_a_test_or_says_why_not(page: Path) -> None:
    code = [block for block in blocks(page) if block.language in ("sh", "python")]
    assert page.stem in [*RUN, *RUN_ELSEWHERE] or all(block.not_run for block in code)
    assert all(block.language for block in blocks(page)), "a block without a language"
    marks = re.findall(r"<!-- (?:not run|in tests|server)", page.read_text())
    assert len(marks) == sum(bool(block.not_run or block.replaced or block.server) for block in blocks(page)), (
        "a mark without a block"
    )
    assert page.stem in INDENTED or indented(page) == []


INDENTED = {"endpoints", "scaling"}
"""Pages whose commands are still blocks by indentation alone."""


def test_readme_shows_what_the_page_of_your_own_pictures_runs() -> None:
    """In the same order; the page has more."""
    page = [(block.text, block.server) for block in blocks(DOCS / "your-own-pictures.md")]
    shown = [block for block in blocks(ROOT / "README.md") if block.not_run is None]
    assert len(shown) > 4
    assert all((block.text, block.server) in page for block in shown)
    places = [page.index((block.text, block.server)) for block in shown]
    assert places == sorted(places)


def test_readme_can_be_read_at_once() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 250


def test_programs_that_pages_show_are_those_of_the_repository() -> None:
    titles = {block.title: block.text for page in PAGES for block in blocks(page) if block.title}
    assert {title: (ROOT / title).read_text() for title in titles} == titles


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
    assert not [text for text in html if "```" in re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)]
    loaded = [
        link for text in html for link in re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(http[^\" >]+)", text)
    ]
    assert loaded == []
