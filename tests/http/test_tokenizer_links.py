"""Clients get the files of a model's folder, and of its repository in the hub's cache: no other file by a link."""

import os
from pathlib import Path

import pytest
from tinker_local.backend.models.tokenizer_files import tokenizer_files


def test_a_link_out_of_the_models_folder_is_not_served(tmp_path: Path) -> None:
    secret, folder, inside = tmp_path / "secret", tmp_path / "model", tmp_path / "model" / "files"
    inside.mkdir(parents=True)
    for file in (secret, inside / "tokenizer", folder / "config.json"):
        file.write_text("{}")
    (folder / "vocab.json").symlink_to(secret)
    (folder / "merges.txt").symlink_to("../secret")
    (folder / "vocab.txt").symlink_to(tmp_path / "gone")
    (folder / "tokenizer.json").symlink_to("files/tokenizer")
    os.link(secret, folder / "added_tokens.json")  # is a file of the folder
    (tmp_path / "elsewhere").symlink_to(folder)
    for path in (folder, tmp_path / "elsewhere"):
        found = tokenizer_files(str(path))
        assert found == {
            "config.json": folder / "config.json",
            "tokenizer.json": inside / "tokenizer",
            "added_tokens.json": folder / "added_tokens.json",
        }


def test_a_model_of_the_hubs_cache_has_the_files_of_its_own_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    own, other = (tmp_path / f"models--org--{name}" for name in ("own", "other"))
    snapshot = own / "snapshots" / "0123"
    for folder in (own / "blobs", own / "refs", snapshot, other / "blobs"):
        folder.mkdir(parents=True)
    (own / "refs" / "main").write_text("0123")
    for repository in (own, other):
        (repository / "blobs" / "ab").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/ab")
    (snapshot / "tokenizer.json").symlink_to("../../../models--org--other/blobs/ab")
    for path in ("org/own", str(snapshot)):
        assert tokenizer_files(path) == {"config.json": own / "blobs" / "ab"}
