"""The page of a report: what is on it, and what is not."""

from pathlib import Path

import pytest
from tinker_local.backend.report.make_report import Report
from tinker_local.backend.report.page import Private, Section


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Private:
    monkeypatch.setenv("HOME", "/home/annemarie")
    monkeypatch.setenv("USER", "annemarie")
    monkeypatch.setenv("SOME_API_KEY", "open-sesame-1234")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-17")
    return Private({"acme/merger-plans", "/data/models/merger-plans", "merger-plans"})


@pytest.mark.parametrize(
    "message",
    [
        "OSError: /data/models/merger-plans/config.json is missing",
        "[Errno 2] No such file: '/home/annemarie/x y/model.safetensors'",
        'File "/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", line 7139',
        "merger-plans: trainer and sampler differ",
        "refused for annemarie on gpu-box-17 with open-sesame-1234",
        "the key tml-abc123-secret is unknown, hf_QWERTYuiop too",
        r"C:\Users\annemarie\models\merger-plans",
        "see ~/models/merger-plans and ../merger-plans/model.safetensors",
    ],
)
def test_a_message_has_no_names_paths_or_keys(private: Private, message: str) -> None:
    said = private.without(message)
    for secret in ("merger", "annemarie", "sesame", "gpu-box", "abc123", "QWERTY", "/data", "/opt", "site-packages"):
        assert secret not in said


def test_numbers_and_words_of_a_message_stay(private: Private) -> None:
    text = "OutOfMemoryError: tried to allocate 2.50 GiB; 1/3 of and/or 12 tokens/s, 0.3 nats (at most 0.1 is normal)"
    assert private.without(text) == text


def test_a_part_that_fails_is_said_and_the_others_stay(private: Private) -> None:
    report = Report(private)
    report.sections.append(Section("Speed", ("what", "tokens/s"), [("training", "12")]))
    with report.measuring("sampling"):
        raise RuntimeError("no file /data/models/merger-plans/vocab.json")
    page = str(report)
    assert "| training | 12 |" in page
    assert "- sampling: RuntimeError: no file <path>" in page
