"""The pages of the site and README, and their blocks of code.

What a page's source says of a block of `sh` or `python` stands in comments above its fence, which readers do not see:

    <!-- not run: REASON -->      the tests only check that its commands, options and imports exist
    <!-- in tests: OLD is NEW --> the tests run it with another text in one place
    <!-- server -->               the command goes on: the tests wait for its `ready:`

A title after ```python is a file that the reader makes, and the page runs later. The site's Markdown knows no other
words after the language.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PAGES = sorted([ROOT / "README.md", *(path for path in DOCS.glob("*.md") if path.stem != "promises")])
"""All that has code; `promises.md` is made of names of tests."""

RUN = ["first-ten-minutes", "train", "your-own-pictures", "rl-with-images", "cookbook", "for-a-team"]
"""Pages whose blocks `test_pages_run.py` runs in order."""

RUN_ELSEWHERE = {
    "README": "its commands are those of pages that run (test_documented_code.py), or say why they are not run",
    "extending": "tests/http/test_http_extending_on_fakes.py and tests/e2e/test_extending_on_engines.py",
    "endpoints": "tests/http/test_http_streams_on_fakes.py and tests/e2e/test_token_ids_on_real_models.py",
    "supported": "tests/families/test_gpt_oss.py",
    "scaling": "needs several GPUs; tests/e2e/test_ranks_over_http.py starts such servers",
    "operations": "names folders, users and services of a server: /srv, /etc, /var, systemd, nginx",
}


class Block(NamedTuple):
    """A fenced block of a page.

    `about`: what follows the language; `server`: it goes on; `not_run`: why tests do not run it; `replaced`: a text and
    what tests put there.
    """

    page: Path
    line: int
    language: str
    about: str
    text: str
    server: bool
    not_run: str | None
    replaced: tuple[str, str] | None

    @property
    def title(self) -> str | None:
        found = re.search(r'title="([^"]+)"', self.about)
        return found[1] if found else None

    def in_tests(self) -> str:
        """The text as tests run it."""
        if self.replaced is None:
            return self.text
        assert self.replaced[0] in self.text, f"{self.page.name}, line {self.line}: {self.replaced[0]} is not there"
        return self.text.replace(*self.replaced)


FENCED = re.compile(
    r"(?:^<!-- (?P<mark>not run|in tests|server)(?:: (?P<why>[^>]*?))? -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<about>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in FENCED.finditer(text):
        why = match["why"]
        old, _, new = why.partition(" is ") if match["mark"] == "in tests" else ("", "", "")
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start("language")) + 1,
                match["language"],
                match["about"].strip(),
                re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
                match["mark"] == "server",
                why if match["mark"] == "not run" else None,
                (old, new) if match["mark"] == "in tests" else None,
            )
        )
    return found


def indented(page: Path) -> list[str]:
    """Blocks of code by indentation alone, whose language is unknown; not the paragraphs of lists."""
    found: list[str] = []
    in_list = False
    for paragraph in re.split(r"\n{2,}", FENCED.sub("", page.read_text())):
        is_code = paragraph.startswith("    ")
        if is_code and not in_list:
            found.append(paragraph)
        in_list = bool(re.match(r"( *)([-*]|\d+\.) ", paragraph)) or (in_list and paragraph.startswith(" "))
    return found
