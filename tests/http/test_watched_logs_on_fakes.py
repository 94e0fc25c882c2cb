"""`--watch-logs`: the `metrics.jsonl` files of other programs, whatever these write, and who sees them."""

import asyncio
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend.http import progress_routes
from tinker_local.backend.storage import watched_logs
from tinker_local.backend.storage.watched_logs import LogPiece, WatchedLogs, parse_line

from tests.http.conftest import Api, StartApi
from tests.http.test_http_owners_on_fakes import ADMIN, ALICE, BOB, key_file, world

EVIL = "<img src=x onerror=alert(1)>"


def write(folder: Path, *lines: Any, name: str = "metrics.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture(autouse=True)
def scan_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_logs, "SCAN_SECONDS", 0.0)


def read(logs: WatchedLogs, log_id: str, after: int = 0, file: str = "") -> LogPiece:
    piece = logs.read(log_id, after, file)
    assert piece is not None
    return piece


def test_a_growing_log_is_read_in_pieces_of_whole_lines_on_fakes(tmp_path: Path) -> None:
    path = write(tmp_path / "sft", {"step": 0, "train_mean_nll": 2.5, "progress/batch": 1})
    logs = WatchedLogs(tmp_path)
    (log,) = logs.logs()
    assert (log.name, log.run_id, log.size_bytes) == ("sft", None, path.stat().st_size)
    first = read(logs, log.id)
    assert first.lines == [{"step": 0, "metrics": {"train_mean_nll": 2.5, "progress/batch": 1}}]
    with path.open("a") as file:
        file.write('{"step": 1, "train_mean')
    assert read(logs, log.id, first.next, first.file) == LogPiece([], first.next, first.file, full=False)
    with path.open("a") as file:
        file.write('_nll": 2.25}\n')
    second = read(logs, log.id, first.next, first.file)
    assert second.lines == [{"step": 1, "metrics": {"train_mean_nll": 2.25}}]
    assert second.next == path.stat().st_size


def test_a_log_that_was_cut_or_replaced_is_read_from_its_beginning_on_fakes(tmp_path: Path) -> None:
    path = write(tmp_path, *({"step": step, "loss": 1.0} for step in range(5)))
    logs = WatchedLogs(tmp_path)
    (log,) = logs.logs()
    first = read(logs, log.id)
    path.write_text('{"step": 0, "loss": 3}\n')  # cut, by a program that begins again
    cut = read(logs, log.id, first.next, first.file)
    assert (cut.lines, cut.file == first.file) == ([{"step": 0, "metrics": {"loss": 3}}], False)
    write(tmp_path / "new", *({"step": step, "loss": 4.0} for step in range(9))).replace(path)
    replaced = read(logs, log.id, cut.next, cut.file)
    assert len(replaced.lines) == 9
    path.unlink()
    assert logs.read(log.id, replaced.next, replaced.file) is None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"step": 3, "loss": NaN, "reward": Infinity, "kl": 0.5}', {"step": 3, "metrics": {"kl": 0.5}}),
        ('{"loss": 1, "name": "text", "ok": true, "none": null, "a": [1]}', {"step": None, "metrics": {"loss": 1}}),
        ('{"step": "3", "loss": 1e308}', {"step": None, "metrics": {"loss": 1e308}}),
        ('{"step": 1e99, "loss": 1}', {"step": None, "metrics": {"loss": 1}}),
        (f'{{"loss": {"9" * 400}, "kl": 1}}', {"step": None, "metrics": {"kl": 1}}),
        ('{"\\ud800": 1, "' + "x" * 129 + '": 1, "": 1, "kl": 1}', {"step": None, "metrics": {"kl": 1}}),
        (json.dumps({"step": 1, EVIL: 2}), {"step": 1, "metrics": {EVIL: 2}}),
        ('{"loss": NaN}', None),
        ("[1, 2]", None),
        ("not json", None),
        ("", None),
        ("[" * 100_000, None),
        ('{"loss": ' + "9" * 5000 + "}", None),
    ],
)
def test_only_finite_numbers_with_names_that_can_be_sent_are_metrics_on_fakes(line: str, found: Any) -> None:
    assert parse_line(line.encode("utf-8", "surrogatepass")) == found
    assert parse_line(b"\xff\xfe{}") is None


def test_lines_files_and_answers_are_bounded_on_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_logs, "BYTES_AT_ONCE", 100)
    monkeypatch.setattr(watched_logs, "MOST_BYTES", 1000)
    path = write(tmp_path, {"loss": 1, "long": "x" * 300}, *({"step": step, "loss": 2} for step in range(100)))
    logs = WatchedLogs(tmp_path)
    (log,) = logs.logs()
    steps, after, file = [], 0, ""
    for _ in range(100):
        piece = read(logs, log.id, after, file)
        steps += [line["step"] for line in piece.lines]
        if piece.next == after:
            break
        after, file = piece.next, piece.file
    assert steps == sorted(steps)
    assert 20 < len(steps) < 40
    assert (piece.full, piece.lines, after <= 1100 < path.stat().st_size) == (True, [], True)
    assert len(parse_line(json.dumps({str(at): at for at in range(1000)}).encode()) or {}) == 2
    wide = parse_line(json.dumps({str(at): at for at in range(1000)}).encode())
    assert wide is not None
    assert len(wide["metrics"]) == watched_logs.MOST_METRICS


def test_links_pipes_and_folders_of_that_name_are_no_logs_on_fakes(tmp_path: Path) -> None:
    secret = write(tmp_path / "outside", {"secret": 1})
    folder = tmp_path / "logs"
    real = write(folder / "real", {"loss": 1})
    (folder / "linked").symlink_to(tmp_path / "outside")
    (folder / "link").mkdir()
    (folder / "link" / "metrics.jsonl").symlink_to(secret)
    (folder / "loop").symlink_to(folder)
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "metrics.jsonl")
    (folder / "folder" / "metrics.jsonl").mkdir(parents=True)
    (folder / "real" / "checkpoints.jsonl").symlink_to(
        write(tmp_path, {"state_path": "tinker://s-1:train:0/weights/a"})
    )
    logs = WatchedLogs(folder)
    (log,) = logs.logs()
    assert (log.name, log.run_id) == ("real", None)
    real.unlink()
    real.symlink_to(secret)  # since the scan
    assert logs.read(log.id, 0, "") is None
    real.unlink()
    os.mkfifo(real)
    assert logs.read(log.id, 0, "") is None
    assert WatchedLogs(tmp_path / "logs" / "linked").logs()[0].name == ".", "the watched folder itself may be a link"


def test_the_newest_of_many_logs_are_found_and_hostile_names_are_text_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_logs, "MOST_LOGS", 3)
    monkeypatch.setattr(watched_logs, "DEEPEST", 3)
    for at in range(6):
        os.utime(write(tmp_path / f"run-{at}", {"loss": 1}), (at, at))
    write(tmp_path / "1" / "2" / "3" / "4", {"loss": 1})
    bad = tmp_path / os.fsdecode(b"\xff\n" + EVIL.replace("/", "").encode())
    os.utime(write(bad, {"loss": 1}), (9, 9))
    names = [log.name for log in WatchedLogs(tmp_path).logs()]
    assert names == [f"\ufffd\n{EVIL}", "run-5", "run-4"]


def test_the_run_of_a_log_is_that_of_its_newest_checkpoint_on_fakes(tmp_path: Path) -> None:
    write(tmp_path, {"loss": 1})
    logs = WatchedLogs(tmp_path)
    runs = []
    for lines in (
        [],
        [{"state_path": "tinker://s-1:train:0/weights/1"}],
        [
            {"state_path": "tinker://s-1:train:0/weights/1"},
            {"sampler_path": "tinker://s-2:train:1/sampler_weights/2", "batch": 3},
        ],
        [{"state_path": "tinker://"}, {"state_path": "/a/path"}, 3],
    ):
        write(tmp_path, *lines, name="checkpoints.jsonl")
        runs.append(logs.logs()[0].run_id)
    assert runs == [None, "s-1:train:0", "s-2:train:1", None]


async def listed(api: Api, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"X-API-Key": key}
    found = (await api.http.get("/api/v1/logs", headers=headers)).json()
    return {log["name"]: log for log in found["logs"]}


async def test_logs_are_listed_and_read_over_http_on_fakes(start_api: StartApi, tmp_path: Path) -> None:
    api = await start_api(watch_logs=tmp_path / "logs")
    model = await api.model()
    write(tmp_path / "logs" / "rl", {"step": 1, "reward": 0.5, "kl": math.nan}, {"note": "no number"})
    write(tmp_path / "logs" / "rl", {"state_path": f"tinker://{model}/weights/1"}, name="checkpoints.jsonl")
    write(tmp_path / "logs" / "other", {"loss": 1})
    found = await listed(api)
    assert {name: log["training_run_id"] for name, log in found.items()} == {"rl": model, "other": None}
    log_id = found["rl"]["log_id"]
    piece = (await api.get(f"logs/{log_id}/curve")).json()
    assert piece["lines"] == [{"step": 1, "metrics": {"reward": 0.5}}]
    again = (await api.get(f"logs/{log_id}/curve", after=piece["next"], file=piece["file"])).json()
    assert (again["lines"], again["next"]) == ([], piece["next"])
    for missing in ("0" * 16, "..", "%2e%2e%2f"):
        assert (await api.get(f"logs/{missing}/curve")).status_code == 404


async def test_an_owner_sees_the_logs_of_its_own_runs_alone_on_fakes(start_api: StartApi, tmp_path: Path) -> None:
    keys = key_file(tmp_path, f"alice {ALICE}\nbob {BOB}\nadmin {ADMIN}\n")
    api = await start_api(api_keys=keys, watch_logs=tmp_path / "logs")
    run = f"{await world(api, ALICE)}:train:0"
    write(tmp_path / "logs" / "of-alice", {"loss": 1})
    write(tmp_path / "logs" / "of-alice", {"state_path": f"tinker://{run}/weights/1"}, name="checkpoints.jsonl")
    write(tmp_path / "logs" / "unmatched", {"loss": 2})
    assert {key: set(await listed(api, key)) for key in (ALICE, BOB, ADMIN)} == {
        ALICE: {"of-alice"},
        BOB: set(),
        ADMIN: {"of-alice", "unmatched"},
    }
    for name, log in (await listed(api, ADMIN)).items():
        for key, status in ((ALICE, 200 if name == "of-alice" else 404), (BOB, 404), (ADMIN, 200)):
            answer = await api.http.get(f"/api/v1/logs/{log['log_id']}/curve", headers={"X-API-Key": key})
            assert answer.status_code == status, (name, key)


async def test_a_folder_that_hangs_is_told_and_nothing_else_waits_for_it_on_fakes(
    start_api: StartApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await start_api(watch_logs=tmp_path)
    answer = threading.Event()
    monkeypatch.setattr(progress_routes, "WATCH_SECONDS", 0.3)
    monkeypatch.setattr(WatchedLogs, "logs", lambda _: answer.wait(60) and [])
    try:
        hanging = [asyncio.create_task(api.get("logs")) for _ in range(6)]
        await asyncio.sleep(0)
        model = await api.model()
        await api.save(model, 1, "while-it-hangs")
        for found in await asyncio.gather(*hanging):
            assert found.status_code == 500
            assert found.json()["error"] == "the folder of --watch-logs did not answer within 0.3 seconds"
    finally:
        answer.set()


async def test_without_a_watched_folder_there_are_no_logs_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    assert (await api.get("logs")).json() == {"logs": [], "watches": False}
    assert (await api.get(f"logs/{'0' * 16}/curve")).status_code == 404
