"""Whole runs on fake engines in this process, through the SDK and the real HTTP app."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker_local.client as tinker
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.load_engines import load_fake
from tinker_local.client.train import Rows, TrainReport, read_evaluation, train
from tinker_local.client.train.loop import DivergedError
from tinker_local.client.train.objectives import Supervised
from tinker_local.client.train.run_folder import RunFolder
from tinker_local.types import InvalidRequestError

from tests.conftest import Server
from tests.train.rows_of_sums import Sums, TokenNames

SETTINGS: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 8, "epochs": 3.0, "held_out": 4, "rank": 4}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinker.ServiceClient]:
    options = BackendOptions(data_dir=tmp_path_factory.mktemp("data"))
    backend = InProcessBackend([ModelSource("fake", "fake")], options, load=load_fake)
    with tinker.ServiceClient(backend=backend) as one:
        yield one


@dataclass
class Run:
    """`train` on sums, with what it said."""

    service: tinker.ServiceClient
    out: Path
    said: list[str] = field(default_factory=list)

    def __call__(self, rows: Rows | None = None, **given: Any) -> TrainReport:
        settings = {**SETTINGS, **given.pop("settings", {})} if not given.get("resume") else given.pop("settings", {})
        return train(
            rows or Sums(),
            model=given.pop("model", "fake"),
            out=given.pop("out", self.out),
            settings=settings,
            service=self.service,
            renderer=lambda client: TokenNames(),
            say=given.pop("say", self.said.append),
            **given,
        )


@pytest.fixture
def run(service: tinker.ServiceClient, tmp_path: Path) -> Run:
    return Run(service, tmp_path / "run")


def steps(curve: list[dict[str, Any]], name: str = "loss") -> dict[int, float]:
    return {row["step"]: row[name] for row in curve if name in row}


def test_a_run_writes_its_curve_and_checkpoints_on_fakes(run: Run) -> None:
    report = run(settings={"evaluate_every": 4, "save_every": 3, "keep_days": 2.0})
    assert report.steps == 9
    assert not report.interrupted
    assert list(steps(report.curve)) == list(range(1, 10))
    assert list(steps(report.curve, "held_out_loss")) == [0, 4, 8, 9]
    measured = report.first_and_last("held_out_loss")
    assert measured is not None
    assert measured[1] < measured[0]
    saved = [json.loads(line) for line in (run.out / "checkpoints.jsonl").read_text().splitlines()]
    assert [each["step"] for each in saved] == [3, 6, 9]
    assert saved[-1]["expires"] is None
    left = datetime.fromisoformat(saved[0]["expires"]) - datetime.now(UTC)
    assert timedelta(days=1, hours=23) < left < timedelta(days=2, seconds=1)
    info = tinker.RestClient(base_url=run.service.endpoint.base_url, api_key=run.service.endpoint.api_key)
    listed = info.list_checkpoints(saved[0]["state"].split("/")[2]).result().checkpoints
    expiries = {each.tinker_path: each.expires_at for each in listed}
    assert expiries[saved[0]["state"]] is not None
    assert expiries[saved[0]["sampler"]] is not None
    assert expiries[saved[2]["state"]] is None


def test_each_step_is_submitted_before_the_one_before_is_awaited_on_fakes(run: Run) -> None:
    order: list[str] = []

    class Watched(Supervised):
        def gradient(self, client: tinker.TrainingClient, rows: Any) -> Any:
            order.append("submit")
            inner = super().gradient(client, rows)

            class Pending:
                def metrics(self) -> Mapping[str, float]:
                    order.append("wait")
                    return inner.metrics()

            return Pending()

    run(settings={"held_out": 0, "steps": 4, "save_every": 0}, objective=lambda rows, settings, folder: Watched(rows))
    assert order == ["submit", "submit", "wait", "submit", "wait", "submit", "wait", "wait"]


def test_the_loss_of_a_step_is_the_mean_over_its_trained_tokens_on_fakes(run: Run) -> None:
    """A fake's first weights are the base's: the mean of the logprobs that its forward pass gives."""
    report = run(settings={"held_out": 0, "steps": 1})
    rows = Sums()
    client = run.service.create_lora_training_client(base_model="fake", rank=4).result()
    data = [rows.examples(row)[0].datum for row in range(len(rows))]  # type: ignore[index]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    from tinker_local.client.train.schedule import Plan, split_rows

    used = Plan(split_rows(len(rows), 0, 0)[0], report.settings).rows_of(1)
    values = [-float(value) for row in used for value in outputs[row]["logprobs"].to_numpy()[3:]]
    assert len(values) == 16
    assert report.curve[0]["tokens"] == 16
    # float32 weights of 1/16 are exact; what is left is the sum of 16 float32 losses
    assert report.curve[0]["loss"] == pytest.approx(sum(values) / len(values), rel=16 * 2**-23)


def test_a_resumed_run_ends_with_the_losses_of_one_that_was_not_interrupted_on_fakes(run: Run, tmp_path: Path) -> None:
    whole = run(settings={"save_every": 4})
    part = run(out=tmp_path / "part", say=_interrupt_at(run, "step 6/9  loss"), settings={"save_every": 4})
    assert part.interrupted
    assert 6 <= part.steps < 9
    resumed = run(out=tmp_path / "part", resume=True)
    assert not resumed.interrupted
    assert steps(resumed.curve) == steps(whole.curve)  # exact, in float64
    assert resumed.saved.step == 9


def _interrupt_at(run: Run, beginning: str) -> Callable[[str], None]:
    """Says nothing; a line that begins so is answered with Ctrl-C."""

    def say(line: str) -> None:
        run.said.append(line)
        if line.startswith(beginning):
            os.kill(os.getpid(), signal.SIGINT)

    return say


def test_ctrl_c_saves_a_checkpoint_and_gives_signals_back_on_fakes(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    report = run(say=_interrupt_at(run, "step 2/9  loss"))
    assert report.interrupted
    assert "Ctrl-C again ends at once" in capfd.readouterr().err
    assert report.saved.step == report.steps < 9
    assert RunFolder(run.out).last_saved() is not None
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_folder_in_which_no_checkpoint_was_written_to_its_end_is_begun_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for text in ("", '{"step": 5, "sta'):
        (tmp_path / "checkpoints.jsonl").write_text(text)
        assert folder.last_saved() is None
        folder.require_new()
    folder.forget_after(0)
    folder.saved(1, "tinker://a/weights/step-1", "tinker://a/sampler_weights/step-1", None)
    with pytest.raises(InvalidRequestError, match="has a run already"):
        folder.require_new()


def test_an_evaluation_without_held_out_rows_is_refused_on_fakes(run: Run) -> None:
    with pytest.raises(InvalidRequestError, match=r"eval: .* held_out is 0"):
        run(settings={"held_out": 0}, evaluation=read_evaluation("exact"))
    assert not run.out.exists()


def test_a_disk_that_is_full_when_a_run_resumes_loses_no_path_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.saved(1, "tinker://a/weights/step-1", "tinker://a/sampler_weights/step-1", None)
    folder.saved(2, "tinker://a/weights/step-2", "tinker://a/sampler_weights/step-2", None)

    def full(path: Path, text: str, *_: object, **__: object) -> int:
        path.open("w").write(text[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            folder.forget_after(1)
    saved = folder.last_saved()
    assert saved is not None
    assert saved.step == 2
    folder.forget_after(1)
    assert (saved := folder.last_saved()) is not None
    assert saved.step == 1


def test_a_second_ctrl_c_ends_at_once_on_fakes(run: Run) -> None:
    def say(line: str) -> None:
        if line.startswith("step 2/9  loss"):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(say=say)


def test_a_run_in_another_thread_leaves_signals_alone_on_fakes(run: Run) -> None:
    found: list[TrainReport] = []
    thread = threading.Thread(target=lambda: found.append(run(settings={"steps": 1})))
    thread.start()
    thread.join()
    assert found[0].steps == 1


def test_preferences_begin_at_ln_2_and_keep_their_reference_on_fakes(run: Run) -> None:
    report = run(Sums(kind="preference"), settings={"learning_rate": 0.02, "save_every": 2})
    assert steps(report.curve)[1] == pytest.approx(0.6931471805599453, abs=1e-9)
    assert steps(report.curve, "held_out_loss")[0] == pytest.approx(0.6931471805599453, abs=1e-9)
    losses = steps(report.curve)
    assert losses[9] < losses[1]
    assert {"accuracy", "margin", "chosen_reward", "rejected_reward"} <= set(report.curve[-2]) | set(report.curve[1])
    kept = [json.loads(line) for line in (run.out / "reference.jsonl").read_text().splitlines()]
    assert sorted(row for row, *_ in kept) == list(range(24))


def test_a_resumed_run_of_preferences_has_the_same_losses_on_fakes(run: Run, tmp_path: Path) -> None:
    rows = Sums(kind="preference")
    whole = run(rows, settings={"learning_rate": 0.02})
    part = run(rows, out=tmp_path / "part", say=_interrupt_at(run, "step 5/9  loss"), settings={"learning_rate": 0.02})
    assert part.interrupted
    resumed = run(rows, out=tmp_path / "part", resume=True)
    assert steps(resumed.curve) == steps(whole.curve)
    assert steps(resumed.curve, "held_out_loss")[9] == steps(whole.curve, "held_out_loss")[9]


def test_a_resumed_run_of_preferences_without_its_reference_is_refused_on_fakes(run: Run) -> None:
    rows = Sums(kind="preference")
    run(rows, say=_interrupt_at(run, "step 5/9  loss"))
    kept = (run.out / "reference.jsonl").read_text().splitlines(keepends=True)
    (run.out / "reference.jsonl").write_text("".join(kept[2:]))
    with pytest.raises(InvalidRequestError, match="lacks the reference of 2 of 24 rows"):
        run(rows, resume=True)
    (run.out / "reference.jsonl").unlink()
    with pytest.raises(InvalidRequestError, match="a resumed run needs it"):
        run(rows, resume=True)


def test_an_evaluation_scores_held_out_answers_and_some_are_shown_on_fakes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def judge(reply, row):\n    return 0.25 if row['a'] < 10 else 1\n")
    evaluation = read_evaluation(f"{tmp_path / 'judge.py'}:judge")
    report = run(settings={"evaluate_every": 0, "samples_shown": 3}, evaluation=evaluation)
    assert steps(report.curve, "held_out_judge") == {0: 0.25, 9: 0.25}
    assert sum(line.startswith("    row ") for line in run.said) == 6
    assert all("wanted 't" in line for line in run.said if line.startswith("    row "))


class PlacedSums(Sums):
    """Rows that say where they are, as those of a file do."""

    def place(self, index: int) -> str:
        return f"sums.jsonl line {index + 1}"


def test_answers_are_told_by_the_lines_of_their_rows_on_fakes(run: Run) -> None:
    """They were told by a number from 0, beside lines from 1 everywhere else."""
    run(PlacedSums(), evaluation=read_evaluation("exact"), settings={"samples_shown": 2})
    lines = {line.split(":")[0] for line in run.said if ": says " in line}
    held_out = {f"    sums.jsonl line {at + 1}" for at in range(24)}
    assert lines
    assert lines <= held_out


def test_bad_settings_folders_and_data_are_refused_before_training_on_fakes(run: Run) -> None:
    for settings, words in (
        ({"learning_rate": -1}, "learning_rate: must be more than 0"),
        ({"held_out": 24}, "held_out: 24 holds out 24 of 24 rows"),
        ({"depth": 3}, "depth: is not a setting"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            run(settings=settings)
    assert not run.out.exists()
    with pytest.raises(InvalidRequestError, match="has no run to resume"):
        run(resume=True)
    run(settings={"steps": 2})
    with pytest.raises(InvalidRequestError, match="has a run already; resume it"):
        run()
    with pytest.raises(InvalidRequestError, match="has done all of its 2 steps"):
        run(resume=True)


def test_a_run_cannot_go_on_with_other_data_model_or_settings_on_fakes(run: Run) -> None:
    run(say=_interrupt_at(run, "step 3/9  loss"))
    with pytest.raises(InvalidRequestError, match="data: not the 24 rows"):
        run(Sums(seed=1), resume=True)
    with pytest.raises(InvalidRequestError, match="data: not the 24 rows"):
        run(Sums(count=23), resume=True)
    with pytest.raises(InvalidRequestError, match=r"learning_rate: the run in .* began with 0\.05"):
        run(resume=True, settings={"learning_rate": 0.1})
    assert run(resume=True, settings={"evaluate_every": 0, "samples_shown": 0}).steps == 9


def test_an_expired_checkpoint_cannot_be_resumed_on_fakes(run: Run) -> None:
    run(say=_interrupt_at(run, "step 3/9  loss"))
    file = run.out / "checkpoints.jsonl"
    line = json.loads(file.read_text().splitlines()[-1])
    file.write_text(json.dumps({**line, "expires": "2020-01-01T00:00:00+00:00"}) + "\n")
    with pytest.raises(InvalidRequestError, match="expired on 2020-01-01"):
        run(resume=True)
    file.write_text(json.dumps({**line, "state": "tinker://s-0:train:0/weights/gone"}) + "\n")
    with pytest.raises(InvalidRequestError, match="the server does not have tinker://s-0:train:0/weights/gone"):
        run(resume=True)


def test_a_loss_that_is_not_finite_ends_the_run_on_fakes(run: Run) -> None:
    class Broken(Supervised):
        def gradient(self, client: tinker.TrainingClient, rows: Any) -> Any:
            inner = super().gradient(client, rows)

            class Pending:
                def metrics(self) -> Mapping[str, float]:
                    return {**inner.metrics(), "loss": float("nan")}

            return Pending()

    with pytest.raises(DivergedError, match=r"step 1: the loss is nan; try a lower learning_rate than 0\.05"):
        run(objective=lambda rows, settings, folder: Broken(rows))
    assert RunFolder(run.out).metrics()[-1]["loss"] is None


def test_what_was_not_chosen_is_printed_with_its_reason_on_fakes(run: Run) -> None:
    train(
        Sums(),
        model="fake",
        out=run.out,
        settings={"steps": 1, "learning_rate": 0.01},
        service=run.service,
        renderer=lambda client: TokenNames(),
        say=run.said.append,
    )
    told = "\n".join(run.said)
    assert "rank 32: the default of Tinker" in told
    assert "batch_size 8: at least 100 steps" in told
    assert "epochs 3: fewer than 1000 rows" in told
    assert "\nlearning_rate" not in told
    assert (
        "23 rows to train on, 1 held out; 46 of 138 tokens of an epoch are trained on; 1 steps of 8 rows, 3 an epoch"
        in told
    )


def test_keys_and_addresses_are_in_none_of_the_files_on_fakes(run: Run) -> None:
    run()
    endpoint = run.service.endpoint
    written = "".join(file.read_text() for file in run.out.iterdir()) + "\n".join(run.said)
    assert endpoint.api_key not in written
    assert endpoint.base_url not in written
    assert "127.0.0.1" not in written


def test_trackers_get_each_step_and_evaluation_and_are_closed_on_fakes(run: Run) -> None:
    got: list[Any] = []

    class Own:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            got.append((step, set(metrics)))

        def close(self) -> None:
            got.append("closed")

    report = run(settings={"steps": 3, "evaluate_every": 2}, trackers=[Own()])
    assert [step for step, _ in got[:-1]] == [0, 1, 2, 2, 3, 3]
    assert [names for _, names in got[:-1]] == [set(row) - {"step"} for row in report.curve]
    assert got[-1] == "closed"


def test_a_run_that_ended_before_its_first_checkpoint_can_begin_again_on_fakes(run: Run) -> None:
    with pytest.raises(InvalidRequestError, match="track: must be one of wandb, tensorboard, trackio, not 'mlflow'"):
        run(trackers=["mlflow"])

    class Broken(Supervised):
        def gradient(self, client: tinker.TrainingClient, rows: Any) -> Any:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        run(objective=lambda rows, settings, folder: Broken(rows))
    with pytest.raises(InvalidRequestError, match="has no checkpoint to go on from"):
        run(resume=True)
    assert list(steps(run(settings={"steps": 2}).curve)) == [1, 2]


def test_a_run_that_was_killed_goes_on_from_its_last_whole_checkpoint_on_fakes(run: Run, tmp_path: Path) -> None:
    whole = run(settings={"save_every": 2})
    out = tmp_path / "part"
    run(out=out, say=_interrupt_at(run, "step 6/9  loss"), settings={"save_every": 2})
    checkpoints, curve = out / "checkpoints.jsonl", out / "metrics.jsonl"
    kept = [line for line in checkpoints.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= 4]
    checkpoints.write_text("".join(kept) + '{"step": 6, "sta')  # as kill -9 leaves it
    with curve.open("a") as file:
        file.write('{"step": 9, "lo')
    resumed = run(out=out, resume=True)
    assert steps(resumed.curve) == steps(whole.curve)
    assert [row["step"] for row in resumed.curve if "loss" in row] == list(range(1, 10))
    assert [json.loads(line)["step"] for line in checkpoints.read_text().splitlines()] == [2, 4, 6, 8, 9]


def test_dpo_begins_with_the_weights_of_a_checkpoint_and_they_are_its_reference_on_fakes(
    run: Run, tmp_path: Path
) -> None:
    first = run()
    pairs = run(Sums(kind="preference"), out=tmp_path / "pairs", start_from=first.saved.state, settings={"steps": 2})
    assert pairs.settings.rank == 4
    assert steps(pairs.curve)[1] == pytest.approx(0.6931471805599453, abs=1e-9)
    rows, service = Sums(), run.service
    client = service.create_training_client_from_state(first.saved.state).result()
    kept = {row: chosen for row, chosen, _ in map(json.loads, (tmp_path / "pairs" / "reference.jsonl").open())}
    for row in list(kept)[:3]:
        (output,) = client.forward([rows.examples(row)[0].datum], "cross_entropy").result().loss_fn_outputs  # type: ignore[index]
        assert kept[row] == pytest.approx(float(output["logprobs"].to_numpy()[3:].astype(float).sum()), rel=1e-6)
    for given, words in (
        ({"start_from": f"{first.saved.state}x"}, "start_from: the server does not have"),
        ({"start_from": first.saved.state, "settings": {"rank": 8}}, "rank: .* has rank 4, so it cannot be 8"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            run(out=tmp_path / "other", **given)


def test_a_judge_that_fails_late_loses_no_steps_on_fakes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "calls = []\n\ndef judge(reply, row):\n    calls.append(1)\n    return 1 / (len(calls) <= 8)\n"
    )
    evaluation = read_evaluation(f"{tmp_path / 'judge.py'}:judge")
    with pytest.raises(InvalidRequestError, match="ends with ZeroDivisionError"):
        run(settings={"evaluate_every": 3, "save_every": 0}, evaluation=evaluation)  # 4 rows at steps 0, 3 and 6
    saved = RunFolder(run.out).last_saved()
    assert saved is not None
    assert saved.step == 6
    assert run(resume=True).steps == 9


def test_a_judge_that_fails_after_the_last_step_leaves_a_checkpoint_that_stays_on_fakes(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "judge.py").write_text(
        "calls = []\n\ndef judge(reply, row):\n    calls.append(1)\n    return 1 / (len(calls) <= 4)\n"
    )
    evaluation = read_evaluation(f"{tmp_path / 'judge.py'}:judge")
    with pytest.raises(InvalidRequestError, match="ends with ZeroDivisionError"):
        run(settings={"evaluate_every": 0, "save_every": 0}, evaluation=evaluation)  # 4 rows at steps 0 and 9
    saved = RunFolder(run.out).last_saved()
    assert saved is not None
    assert (saved.step, saved.expires) == (9, None)


def test_two_runs_do_not_write_into_one_folder_on_fakes(run: Run) -> None:
    with RunFolder(run.out).held(), pytest.raises(InvalidRequestError, match="another run is writing to"):
        run()
    assert run().steps == 9


def test_a_checkpoint_that_the_folder_cannot_note_is_named_on_fakes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "checkpoints.jsonl")

    monkeypatch.setattr(RunFolder, "saved", full)
    with pytest.raises(OSError, match=r"No space left on device: 'checkpoints\.jsonl'"):
        run()
    assert any(line.endswith("could not note") and "tinker://" in line for line in run.said)


def test_speed_is_told_over_several_steps_on_fakes(run: Run) -> None:
    """Answers of two steps may come at the same time."""
    report = run()
    seconds, tokens = ([row[name] for row in report.curve if "learning_rate" in row] for name in ("seconds", "tokens"))
    (last,) = [line for line in run.said if line.startswith("step 9/9  loss")]
    assert f"{sum(tokens) / sum(seconds):,.0f} trained tokens/s" in last


def test_a_model_that_a_fake_server_does_not_have_is_named_with_those_that_it_has(
    fake_server: Server, tmp_path: Path
) -> None:
    words = f"model: the server at {fake_server.url} has no Qwen/Qwen3-4B; it has fake/bigram, fake/other"
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(words)}$"):
        train(Sums(), model="Qwen/Qwen3-4B", out=tmp_path / "run", base_url=fake_server.url, say=lambda line: None)
    assert not (tmp_path / "run").exists()
