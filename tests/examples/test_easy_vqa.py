"""The example of questions about pictures: its parts, and short runs on drawings, and on easy-vqa where it is there."""

import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image, ImageDraw
from transformers import AutoTokenizer

from tests.conftest import VISION

ROOT = Path(__file__).parents[2]
EASY_VQA = ROOT / ".test-files" / "easy-vqa"
SHORT = ["--steps", "60", "--blind-steps", "60", "--learning-rate", "1e-2"]
COLOURS = {"red": (220, 30, 30), "blue": (40, 60, 220)}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import easy_vqa  # type: ignore[import-not-found]

    return easy_vqa


@pytest.fixture
def drawings(tmp_path: Path) -> Path:
    """A folder laid out as easy-vqa: eight squares in each part, with two questions each."""
    for part in ("train", "test"):
        (tmp_path / part / "images").mkdir(parents=True)
        questions = []
        for number in range(8):
            colour = list(COLOURS)[number % 2]
            image = Image.new("RGB", (64, 64), (240, 250, 245))
            ImageDraw.Draw(image).rectangle((4 * number, 10, 4 * number + 20, 30), COLOURS[colour])
            image.save(tmp_path / part / "images" / f"{number}.png")
            questions.append(["what color is the shape?", colour, number])
            questions.append(["is there a red shape?", "yes" if colour == "red" else "no", number])
        (tmp_path / part / "questions.json").write_text(json.dumps(questions))
    return tmp_path


def run(*arguments: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
    """The example, run as a user runs it."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "easy_vqa.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)


def test_a_missing_data_set_is_named_before_a_server_is_asked(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ["--base-url", "http://127.0.0.1:1"]
    monkeypatch.setattr(sys, "argv", ["easy_vqa.py", *server, "--data", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        example.main()
    missing = tmp_path / "train" / "questions.json"
    assert end.value.code == (f"error: {missing} does not exist; fetch it: python scripts/fetch_test_files.py easy-vqa")


def test_every_question_comes_once_before_any_comes_again(example: ModuleType, drawings: Path) -> None:
    questions = example.read(drawings, "train")
    seeds = [[*islice(example.batches(questions, 4, seed), 8)] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    for batches in seeds:
        assert [len(batch) for batch in batches] == [4] * 8
        for half in (batches[:4], batches[4:]):
            assert sorted(one for batch in half for one in batch) == sorted(questions)
    assert len(next(example.batches(questions, 40, 1))) == 40


def test_the_answer_alone_is_trained_on_after_the_prompt_of_the_chat_template(
    example: ModuleType, drawings: Path, tiny_models: dict[str, Path]
) -> None:
    folder = tiny_models[VISION]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    info = SimpleNamespace(model_data=SimpleNamespace(tokenizer_id=str(folder)))
    task = example.Task(SimpleNamespace(get_tokenizer=lambda: tokenizer, get_info=lambda: info))
    one = example.read(drawings, "train")[0]
    content = [{"type": "image"}, {"type": "text", "text": one.text}]
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in template.split("<|image_pad|>"))
    first, picture, last = task.prompt(one).chunks
    assert [*first.tokens] == before
    assert [*last.tokens] == after
    assert picture.data == one.picture.read_bytes()
    blind = task.prompt(one, picture=False)
    assert tokenizer.decode(blind.to_ints()) == template.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    for seen in (True, False):
        datum = task.datum(one, picture=seen)
        inputs = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
        trained = inputs["target_tokens"][inputs["weights"] == 1]
        assert tokenizer.decode(trained) == f"{one.answer}<|im_end|>"
        assert datum.model_input.length == len(inputs["weights"])
        assert not inputs["weights"][: -len(trained)].any()
        assert [*datum.model_input.chunks[-1].tokens] == trained[:-1].tolist()


@pytest.mark.more
def test_a_run_on_drawings_answers_the_same_through_all_apis(real_server: Any, drawings: Path, tmp_path: Path) -> None:
    """The tiny model learns this by heart; blind, it can tell one of two colours."""
    settings = [*SHORT, "--batch-size", "16", "--print-every", "30"]
    out = tmp_path / "report.json"
    server = ["--base-url", real_server.url, "--model", VISION, "--data", str(drawings)]
    done = run(*server, *settings, "--min-accuracy", "0.7", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with pictures: step 30 of 60   loss " in done.stdout
    assert "questions alone: step 60 of 60   loss " in done.stdout
    report = json.loads(out.read_text())
    assert report["held_out"] == report["asked_again"] == 16
    assert report["most_frequent"] == 0.25
    assert report["questions_alone"] == 0.5
    assert report["with_pictures"] >= 0.7
    assert report["sdk"] == report["chat"] == report["openai"] == report["with_pictures"]
    assert (report["other_answers"], report["other_prompts"]) == (0, 0)
    assert report["logprob_difference"] < 1e-4


@pytest.mark.more
def test_a_run_below_the_mark_fails(real_server: Any, drawings: Path) -> None:
    server = ["--base-url", real_server.url, "--model", VISION, "--data", str(drawings)]
    done = run(*server, "--steps", "1", "--blind-steps", "1", "--ask-again", "0", "--min-accuracy", "0.9")
    assert done.returncode == 1
    assert "right is below 90%" in done.stderr


@pytest.mark.skipif(not EASY_VQA.exists(), reason="no easy-vqa here: python scripts/fetch_test_files.py easy-vqa")
def test_the_parts_of_easy_vqa_have_no_picture_in_common(example: ModuleType) -> None:
    parts = {part: example.read(EASY_VQA, part) for part in ("train", "test")}
    assert {part: len(questions) for part, questions in parts.items()} == {"train": 38_575, "test": 9_673}
    pictures = {
        part: {file: file.read_bytes() for file in {one.picture for one in questions}}
        for part, questions in parts.items()
    }
    assert {part: len(found) for part, found in pictures.items()} == {"train": 4_000, "test": 1_000}
    assert not {*pictures["train"].values()} & {*pictures["test"].values()}
    assert len(Counter(one.answer for questions in parts.values() for one in questions)) == 13


@pytest.mark.more
@pytest.mark.skipif(not EASY_VQA.exists(), reason="no easy-vqa here: python scripts/fetch_test_files.py easy-vqa")
def test_a_short_run_on_easy_vqa_beats_the_most_frequent_answer(real_server: Any, tmp_path: Path) -> None:
    """What all steps reach is in benchmarks/results; these learn little more than what fits which question."""
    settings = [*SHORT, "--batch-size", "32", "--held-out", "200"]
    out = tmp_path / "report.json"
    server = ["--base-url", real_server.url, "--model", VISION]
    done = run(*server, *settings, "--ask-again", "20", "--min-accuracy", "0", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["most_frequent"] < 0.45 < report["with_pictures"]
    assert report["sdk"] == report["chat"] == report["openai"]
    assert report["other_answers"] == 0
