"""Asks the model of README's section on your own pictures about every picture that was held out, in each of its ways.

    ask_held_out.py URL QUESTION     in the folder where the section's commands have run

All must answer as the program that trained measured it, and a picture as it lies in its folder must be seen as in
training, though it is larger.
"""

import base64
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx

from tests.documentation.pages import ROOT

EXAMPLES = ROOT / "examples"

GOOD = 0.9
"""Held-out accuracy that the section's training reaches at least. Answering one class always gives a quarter."""


def playground_body(model: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What the console's playground sends at temperature 0 (test_console_in_chromium_on_fakes.py compares them)."""
    return {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 256,
        "temperature": 0,
        "top_p": 1,
        "messages": [{"role": "user", "content": parts}],
    }


def through_chat(url: str, model: str, files: list[Path], question: str) -> list[str]:
    lines = "".join(f"/image {file}\n{question}\n/reset\n" for file in files)
    command = ["chat", model, "--url", url, "--temperature", "0", "--max-tokens", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "tinker_local.backend.cli.main", *command], input=lines, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("sent as 32 x 32 pixels") == len(files), done.stderr
    return done.stdout.splitlines()


def through_ask(url: str, model: str, files: list[Path], question: str) -> list[str]:
    os.environ["TINKER_BASE_URL"] = url
    answers, said = io.StringIO(), io.StringIO()
    for file in files:
        sys.argv = ["ask.py", model, str(file), question]
        with redirect_stdout(answers), redirect_stderr(said):
            runpy.run_path(str(EXAMPLES / "ask.py"), run_name="__main__")
    assert said.getvalue().count("shrunk to the 32 pixels") == len(files), said.getvalue()
    return answers.getvalue().splitlines()


def through_the_playground(url: str, model: str, pictures: list[bytes], question: str) -> list[str]:
    """The page's own shrinking is the browser's, so these pictures are small already, as those of held_out/."""
    answers = []
    for picture in pictures:
        image = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
        answer = httpx.post(f"{url}/v1/chat/completions", json=playground_body(model, parts), timeout=120)
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        answers.append("".join(choice["delta"].get("content") or "" for choice in choices))
    return answers


def main() -> None:
    url, question = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))
    read_folder: Callable[..., Any] = runpy.run_path(str(EXAMPLES / "image_folders.py"))["read_folder"]
    report = json.loads(Path("runs/pictures/report.json").read_text())
    dataset = read_folder(Path("pictures"), share=0.2, seed=0, side=32)
    files, names = [one.source for one in dataset.held_out], [one.name for one in dataset.held_out]
    small = []
    for file in files:
        png = io.BytesIO()
        dataset.image(file, None).save(png, "PNG")
        small.append(png.getvalue())
    answers = {
        "chat": through_chat(url, report["sampler"], files, question),
        "ask.py": through_ask(url, report["sampler"], files, question),
        "the playground": through_the_playground(url, report["sampler"], small, question),
    }
    assert report["accuracy"] > GOOD, report
    for way, found in answers.items():
        assert len(found) == len(names), (way, found)
        right = sum(answer.strip() == name for answer, name in zip(found, names, strict=True))
        print(f"{way}: {right} of {len(names)} held-out pictures are right; the report says {report['accuracy']:.1%}")
        assert abs(right / len(names) - report["accuracy"]) < 1e-9, (way, found)


if __name__ == "__main__":
    main()
