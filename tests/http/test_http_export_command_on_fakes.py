"""`tinker-local export` finds a checkpoint and its base model where the server left them, and what it says if not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinker_local.backend.cli.main import main
from tinker_local.backend.exporting.trained import find_checkpoint
from tinker_local.backend.storage.model_paths import model_paths, record_model_paths
from tinker_local.types import NotFoundError

from tests.http.conftest import StartApi


async def test_a_checkpoint_is_found_by_its_path_while_the_server_runs_and_after_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    model = await api.model()
    await api.result(await api.step(model, 1))
    await api.save(model, 2, "final")
    data_dir = api.backend.options.data_dir
    path = f"tinker://{model}/weights/final"
    found = find_checkpoint(path, data_dir)
    assert (found.name, found.base_name, found.base_path) == (path, "fake/bigram", "fake/bigram")
    await api.backend.close()
    assert find_checkpoint(path, data_dir) == found
    assert find_checkpoint(str(found.folder), Path("elsewhere")) == found
    with pytest.raises(NotFoundError, match="--data-dir"):
        find_checkpoint(path.replace("final", "none"), data_dir)
    (found.folder / ".removing").touch()
    with pytest.raises(NotFoundError):
        find_checkpoint(path, data_dir)


def test_models_are_remembered_and_a_broken_record_is_started_anew_on_fakes(tmp_path: Path) -> None:
    record_model_paths(tmp_path, {"/a": ["one", "two"], "hub/name": ["hub/name"]})
    record_model_paths(tmp_path, {"/b": ["two"]})
    assert model_paths(tmp_path) == {"one": "/a", "two": "/b", "hub/name": "hub/name"}
    (tmp_path / "models.json").write_text("[")
    record_model_paths(tmp_path, {"/c": ["three"]})
    assert json.loads((tmp_path / "models.json").read_text()) == {"three": "/c"}


def test_the_command_says_in_a_line_what_is_missing_on_fakes(tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(
        main, ["export", "tinker://a/weights/b", str(tmp_path / "o"), "--to", "peft", "--data-dir", str(tmp_path)]
    )
    assert done.exit_code == 1
    working, said = done.output.splitlines()
    assert working == "importing torch ..."
    assert said.startswith("Error: tinker://a/weights/b is not in the data folder")
    done = run(main, ["export", str(tmp_path / "none"), str(tmp_path / "o"), "--to", "merged"])
    assert (done.exit_code, done.output.count("\n")) == (1, 2)
    assert "there is no such folder" in done.output
