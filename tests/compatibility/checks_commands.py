"""Commands of `tinker`."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
import pytest
import tinker
from tinker.lib.credentials import JsonCredentialStore, ManualKey, default_credentials_path

from tests.compatibility.checks_rest import check_trace, checkpoint, run_and_path
from tests.compatibility.world import World
from tests.compatibility.write_report import refused, works


@works("tinker version", by="the SDK's version, without a request")
def version(world: World) -> None:
    assert tinker.__version__ in world.command("version", output="table")


@works("tinker auth status", by="the key is taken")
def auth_status(world: World) -> None:
    assert world.command("auth", "status", output="table")


@works("tinker auth logout", by="local: the stored key is gone")
def auth_logout(world: World) -> None:
    with TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", home)
        store = JsonCredentialStore(default_credentials_path())
        details = {"org_details": {"name": "o"}, "user_details": {"email": "e@localhost"}}
        store.add_key("1", ManualKey(key="tml-local", name="n", note="", details=details))  # type: ignore[arg-type]
        store.set_default("1")
        world.command("auth", "logout", output="table", HOME=home)
        assert store.get_default_key() is None


@works("tinker model list", by="the served models")
def model_list(world: World) -> None:
    assert world.model in str(world.command("model", "list"))


@works("tinker run list", "tinker run info", by="a new run with its rank")
def run(world: World) -> None:
    run_id = world.training().get_info().model_id
    assert run_id in str(world.command("run", "list", "--limit", "1"))
    found = world.command("run", "info", run_id)
    assert run_id in str(found)
    assert world.model in str(found)


@works("tinker checkpoint list", "tinker checkpoint info", by="a new checkpoint with its kind")
def checkpoint_list(world: World) -> None:
    client, path = run_and_path(world)
    assert path in str(world.command("checkpoint", "list", "--limit", "1"))
    assert path in str(world.command("checkpoint", "list", "--run-id", client.get_info().model_id))
    found = str(world.command("checkpoint", "info", path))
    assert path in found
    assert "training" in found


@works("tinker checkpoint publish", "tinker checkpoint unpublish", by="the listing says public, then no more")
def publish(world: World) -> None:
    _, path = run_and_path(world)
    world.command("checkpoint", "publish", path, output="table")
    assert checkpoint(world, path).public
    world.command("checkpoint", "unpublish", path, output="table")
    assert not checkpoint(world, path).public


@works("tinker checkpoint set-ttl", by="the listing has an expiry, then none")
def set_ttl(world: World) -> None:
    _, path = run_and_path(world)
    world.command("checkpoint", "set-ttl", path, "--ttl", "7200", output="table")
    assert checkpoint(world, path).expires_at is not None
    world.command("checkpoint", "set-ttl", path, "--remove", output="table")
    assert checkpoint(world, path).expires_at is None


@works("tinker checkpoint delete", by="it is in no listing any more")
def delete(world: World) -> None:
    _, path = run_and_path(world)
    world.command("checkpoint", "delete", path, "-y", output="table")
    assert checkpoint(world, path) is None


@works("tinker checkpoint download", by="PEFT's two files lie in the folder")
def download(world: World) -> None:
    _, path = run_and_path(world)
    with TemporaryDirectory() as folder:
        world.command("checkpoint", "download", path, "--output", folder, output="table")
        names = {file.name for file in Path(folder).rglob("*") if file.is_file()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= names


@works("tinker checkpoint push-hf", by="what would be uploaded are PEFT's two files (the hub itself is not asked)")
def push_hf(world: World) -> None:
    _, path = run_and_path(world)
    uploaded: list[str] = []

    def upload_folder(api: Any, *, folder_path: str, **_: Any) -> None:
        uploaded.extend(file.name for file in Path(folder_path).rglob("*") if file.is_file())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
        patch.setattr(huggingface_hub.HfApi, "create_repo", lambda *_, **__: None)
        patch.setattr(huggingface_hub.HfApi, "whoami", lambda *_, **__: {"name": "someone"})
        world.command("checkpoint", "push-hf", path, "--repo", "someone/adapter", output="table")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(uploaded)


@refused("tinker auth login", saying="no accounts")
def auth_login(world: World) -> None:
    with TemporaryDirectory() as home:
        world.command("auth", "login", output="table", typed=f"{world.api_key}\n", HOME=home)


@refused("tinker auth whoami", saying="whoami requires JWT auth")
def auth_whoami(world: World) -> None:
    world.command("auth", "whoami")


@works("tinker session export-trace", by="the file has a slice for every request made")
def export_trace(world: World) -> None:
    run_id = world.training().get_info().model_id
    session = world.service.holder.get_session_id()
    with TemporaryDirectory() as folder:
        file = Path(folder, f"{session}.pftrace")
        world.command("session", "export-trace", session, "--output", str(file), output="table")
        check_trace(file.read_bytes(), run_id)


@refused("tinker billing usage", saying="no billing")
def billing_usage(world: World) -> None:
    world.command("billing", "usage", "2026-11-01", "2026-11-02")


@refused("tinker billing checkpoint-storage", saying="no billing")
def billing_storage(world: World) -> None:
    world.command("billing", "checkpoint-storage")
