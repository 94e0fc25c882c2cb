"""Every block of the tutorials runs, in the order of its page, in a folder that looks like a fresh clone."""

import os
import re
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.documentation.pages import DOCS, ROOT, RUN, Block, blocks

SECONDS = 600
"""That a page may take on a busy machine."""

CLONE = [".venv", "Makefile", "examples", "packages", "pyproject.toml", "scripts", "tests", "uv.lock"]
"""What the commands of the pages, and AFTERWARDS, need of a clone."""

BEGINNING = """
set -euo pipefail
server=
stop() { [ -z "$server" ] || { kill "$server" && wait "$server" || true; }; }
trap stop EXIT
"""

WAITING = """
server=$!
touch server.log
until grep -q "ready: http" server.log; do
    kill -0 "$server" || { cat server.log; exit 1; }
    sleep 0.1
done
"""

END_OF_SDK = "|| [ $? = 134 ]"
"""The SDK's threads rarely abort their process when Python has ended, after all that the block does."""

PRINTED = {
    "first-ten-minutes": [r"^loss \d", r"^tinker://\S+/weights/first$", r"fake/bi"],
    "train": [
        r"^60 rows, 60 sequences of",
        r"learning_rate 0\.003: a tiny model",
        r"^held out loss: [\d.]+ before, [\d.]+ after$",
        r"checked: PEFT and the trainer differ by",
    ],
    "your-own-pictures": [
        r"held-out accuracy",
        *(rf"^{way}: \d+ of \d+ held-out pictures are right" for way in ("chat", "ask.py", "the playground")),
        r"checked: PEFT and the trainer differ by",
        r"checked: transformers and the trainer differ by",
        r"^(stop|parking|priority|yield)$",  # of the exported model
    ],
    "rl-with-images": [r"^step 2: mean return -?\d"],
    "cookbook": [r"Qwen/Qwen3-8B"],
    "for-a-team": [r"^tinker_local_build_info"],
}
"""What shows that the blocks of a page did what they are for."""

AFTERWARDS = {
    "your-own-pictures": '.venv/bin/python -m tests.documentation.ask_held_out http://127.0.0.1:8000 "Which sign?"\n'
}
"""What the tests run while a page's server still goes on."""


def script(page: Path, port: int) -> str:
    """The page as a program of bash that ends with the first block that fails."""

    def part(block: Block) -> str:
        text = block.in_tests().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        if block.language == "python":
            if block.title and (ROOT / block.title).exists():  # test_documented_code.py compares them
                return ""
            runs = f"cat > {block.title}" if block.title else ".venv/bin/python -"
            return f"{runs} <<'END OF BLOCK' {END_OF_SDK}\n{text}END OF BLOCK\n"
        if block.server:
            return f"exec {text.rstrip()} > server.log 2>&1 &{WAITING}"
        return text

    run = [block for block in blocks(page) if block.language in ("sh", "python") and block.not_run is None]
    after = AFTERWARDS.get(page.stem, "").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return BEGINNING + "\n".join(f"echo '== line {block.line}' >&2\n{part(block)}" for block in run) + after


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_page(page: Path, folder: Path) -> str:
    """What the blocks of a page print, run in `folder`."""
    for name in CLONE:
        (folder / name).symlink_to(ROOT / name)
    port = free_port()
    (folder / "page.sh").write_text(script(page, port))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    environment |= {
        "PYTHONWARNINGS": "ignore",
        "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
        "TINKER_LOCAL_SERVE_PORT": str(port),
        "NO_COLOR": "1",
    }
    command = subprocess.Popen(
        ["bash", "page.sh"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        printed, _ = command.communicate(timeout=SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)  # a page that took too long, with its server
    server = folder / "server.log"
    log = server.read_text() if server.exists() else ""
    assert command.returncode == 0, f"{page.name}:\n{printed}\n{log}"
    return printed


@pytest.mark.more
@pytest.mark.rotated(2)
@pytest.mark.parametrize("name", RUN)
def test_every_block_of_a_page_runs(name: str, tmp_path: Path) -> None:
    printed = run_page(DOCS / f"{name}.md", tmp_path)
    for pattern in PRINTED[name]:
        assert re.search(pattern, printed, re.MULTILINE), f"{pattern} is not in:\n{printed}"


@pytest.mark.parametrize(
    "block", ["```sh\nfalse\n```", "```python\nraise ValueError\n```", "```sh\necho $undefined_name\n```"]
)
def test_a_block_that_fails_is_found(block: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{block}\n\n```sh\ntrue\n```\n")
    (tmp_path / "clone").mkdir()
    with pytest.raises(AssertionError, match=r"page\.md"):
        run_page(page, tmp_path / "clone")


def test_blocks_share_a_shell_and_files_and_marks_are_obeyed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nname=one\n```\n\n"
        '```python title="two.py"\nimport sys\n\nprint(sys.argv[1], "two")\n```\n\n'
        '<!-- in tests: four is three -->\n```sh\n.venv/bin/python two.py "$name four"\n```\n\n'
        "<!-- not run: it fails -->\n```sh\nfalse\n```\n"
    )
    (tmp_path / "clone").mkdir()
    assert "one three two" in run_page(page, tmp_path / "clone")
