"""`tinker-local train` from end to end on a tiny model: with a server of its choice, and with one that it starts."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import PIL.Image
import pytest

from tests.conftest import TEXT, VISION, Server

pytestmark = pytest.mark.more

COMMAND = [sys.executable, "-m", "tinker_local.backend.cli.main", "train"]


def write_sums(file: Path, count: int = 24) -> Path:
    """Sums of two digits as conversations."""
    asked = [(at % 5, at // 5) for at in range(count)]
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in asked
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "NO_COLOR": "1", **(environment or {})},
    )


def metrics(folder: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def children_of_train(folder: Path) -> list[str]:
    """Command lines of servers whose data folder is in `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and "--data-dir" in line:
            found.append(line)
    return found


def test_ctrl_c_saves_and_the_printed_command_goes_on_with_a_server_of_its_start(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    data, out = write_sums(tmp_path / "sums.jsonl"), tmp_path / "run"
    arguments = [
        str(data),
        "--model",
        f"{TEXT}={tiny_models[TEXT]}",
        "--out",
        str(out),
        "--data-dir",
        str(tmp_path / "data"),
    ]
    chosen = ["--epochs", "60", "--batch-size", "8", "--held-out", "4", "--rank", "4", "--evaluate-every", "60"]
    environment = {"TINKER_LOCAL_SERVE_KV_CACHE": "0.25", "PYTHONUNBUFFERED": "1", "FORCE_COLOR": "1"}
    process = subprocess.Popen(
        [*COMMAND, *arguments, *chosen],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1", **environment},
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.match(r"step 6/180 ", line):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal: to each process of the group
            break
    rest, errors = process.communicate(timeout=300)
    said = "".join(lines) + rest
    assert process.returncode == 130, said + errors
    assert "Ctrl-C again ends at once" in errors
    assert "24 rows, 24 sequences of" in said
    assert "sums.jsonl line 1: " in said  # one row with its mask: without colours trained tokens are in brackets
    assert re.search(r"0\+0\?.*\n?.*assistant⏎\n\[0\]\[<\|im_end\|>\]", said), said[:3000]
    assert "learning_rate 0.003: a tiny model" in said
    assert children_of_train(tmp_path) == []
    (command,) = [line for line in said.splitlines() if line.startswith("tinker-local train ")]
    again = shlex.split(command)[2:]
    assert again[-1] == "--resume"
    given = [*arguments[1:], *chosen]
    options = dict(zip(again[1:-1:2], again[2:-1:2], strict=True))
    assert options == dict(zip(given[::2], given[1::2], strict=True)) | {"--epochs": "60.0", "--held-out": "4.0"}
    done = run(*again, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(metrics(out, "loss")) == list(range(1, 181))
    assert metrics(out, "loss")[180] < 0.5 * metrics(out, "loss")[1]
    assert re.search(r"held out loss: [\d.]+ before, [\d.]+ after", done.stdout)
    assert children_of_train(tmp_path) == []
    state = json.loads((out / "checkpoints.jsonl").read_text().splitlines()[-1])["state"]
    assert f"export it: tinker-local export {state}" in done.stdout


def test_preferences_are_judged_on_a_running_server(real_server: Server, tmp_path: Path) -> None:
    rows = [{"prompt": f"{at % 5}+{at // 5}=", "chosen": str(at % 5 + at // 5), "rejected": "no"} for at in range(20)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judge.py").write_text(
        "def short(reply, row):\n    return len(reply) < 100 and row['rejected'] == 'no'\n"
    )
    done = run(
        *(str(data), "--model", TEXT, "--url", real_server.url, "--out", str(tmp_path / "run")),
        *("--eval", f"{tmp_path / 'judge.py'}:short", "--epochs", "4", "--held-out", "4", "--rank", "8"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = metrics(tmp_path / "run", "loss")
    assert losses[1] == pytest.approx(0.6931, abs=1e-3)
    assert losses[len(losses)] < losses[1]
    assert set(metrics(tmp_path / "run", "held_out_judge")) >= {0, len(losses)}
    assert "reference: logprobs of 20 pairs" in done.stdout
    assert "chosen: " in done.stdout
    assert "rejected: " in done.stdout


def test_pictures_are_trained_and_evaluated(real_server: Server, tmp_path: Path) -> None:
    rows = []
    for at, colour in enumerate(["red", "green", "blue", "white"] * 3):
        PIL.Image.new("RGB", (56, 56), colour).save(tmp_path / f"{at}.png")
        asked = [{"type": "image_url", "image_url": {"url": f"{at}.png"}}, {"type": "text", "text": "Which colour?"}]
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": colour}]})
    data = tmp_path / "colours.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(
        *(str(data), "--model", VISION, "--url", real_server.url, "--out", str(tmp_path / "run"), "--eval", "choice"),
        *("--epochs", "8", "--held-out", "4", "--rank", "8", "--samples-shown", "1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = metrics(tmp_path / "run", "loss")
    assert losses[len(losses)] < 0.5 * losses[1]
    assert re.search(r"<picture, \d+ positions>", done.stdout)
    assert set(metrics(tmp_path / "run", "held_out_choice")) >= {0, len(losses)}


def test_all_bad_rows_are_listed_and_can_be_skipped(real_server: Server, tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl", 10)
    bad = [*data.read_text().splitlines(), *(["not JSON", '{"messages": []}', '{"answer": 1}'] * 10)]
    data.write_text("\n".join(bad) + "\n")
    arguments = [str(data), "--model", TEXT, "--url", real_server.url, "--out", str(tmp_path / "run"), "--steps", "2"]
    refused = run(*arguments)
    assert refused.returncode == 1
    assert "30 of 40 rows cannot be used; mend them, or go on without them with --skip-bad" in refused.stderr
    named = {int(found) for found in re.findall(r"sums\.jsonl line (\d+)", refused.stderr)}
    assert named == set(range(11, 41))
    assert not (tmp_path / "run" / "run.json").exists()
    done = run(*arguments, "--skip-bad")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 bad rows are left out" in done.stdout
    assert sorted(metrics(tmp_path / "run", "loss")) == [1, 2]


def test_a_model_that_the_server_does_not_have_is_told_in_one_line(real_server: Server, tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl")
    refused = run(str(data), "--model", "tiny/txt", "--url", real_server.url, "--out", str(tmp_path / "run"))
    assert refused.returncode == 1
    words = f"Error: model: the server at {real_server.url} has no tiny/txt; it has {TEXT}, {VISION}\n"
    assert refused.stderr == words


def errors_of(arguments: Sequence[str]) -> tuple[int, str]:
    done = run(*arguments)
    return done.returncode, done.stderr


def test_what_is_wrong_is_said_before_a_server_is_started(tmp_path: Path) -> None:
    data = str(write_sums(tmp_path / "sums.jsonl"))
    out = ["--out", str(tmp_path / "run")]
    for arguments, words in (
        ([str(tmp_path / "none.jsonl"), "--model", "m"], "none.jsonl does not exist"),
        ([data, "--model", "m", *out, "--eval", "bleu"], "eval: must be exact, choice or FILE.py:FUNCTION, not 'bleu'"),
        ([data, "--model", "m", *out, "--held-out", "2.5"], "held_out: must be a share below 1 or a whole number"),
        ([data, "--model", "m", *out, "--resume"], "has no run to resume"),
        ([data, "--model", "m=p", *out, "--url", "http://127.0.0.1:9"], "has its models already; give m alone"),
        ([data, "--model", "m", *out, "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        ([data, "--model", "m", *out, "--media-folder", str(tmp_path / "x")], "is not a folder"),
    ):
        status, errors = errors_of(arguments)
        assert status in (1, 2), errors
        assert words in errors
        assert "Traceback" not in errors
