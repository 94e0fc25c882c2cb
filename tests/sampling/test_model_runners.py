"""vLLM's two model runners give the same tokens and logprobs; on a CPU, V2 runs in Triton's interpreter."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_local.backend.vllm_engine import compat_vllm, triton_on_cpu
from tinker_local.backend.vllm_engine.patches import PATCHES
from tinker_local.types import UnsupportedError

from tests.sampling.sampling_answers import EVERYTHING

LATE = """
from tinker_local.backend.vllm_engine import triton_on_cpu
try:
    triton_on_cpu.interpret()
except Exception as error:
    print(error)
"""

PROGRAM = Path(__file__).with_name("runner_answers.py")


def start(runner: str, arguments: list[str]) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])  # programs import from `tests`
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner, "PYTHONPATH": path}
    environment["TRITON_INTERPRET"] = runner
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, answer in first.items():
        for field, value in answer.items():
            other = second[name][field]
            if field in ("tokens", "reasons", "top of the prompt"):
                assert value == other, (name, field)
            else:
                for one, two in zip(value, other, strict=True):
                    np.testing.assert_allclose(one, two, atol=1e-4, rtol=0, err_msg=f"{name}, {field}")


@pytest.mark.mutation(
    "preempted-draws-again",
    "FullVocabularySampler.add_request",
    "self.draw.past(params.seed, sampled, self._vocab_size)",
    "self.draw.past(params.seed, 0, self._vocab_size)",
)
@pytest.mark.more
@pytest.mark.skipif(not compat_vllm.runs_on_cpu(), reason="on CUDA logits depend on how requests share steps")
def test_both_runners_give_the_same_tokens_and_logprobs(text: Any, tmp_path: Path) -> None:
    """Seeds, cuts, penalties, adapters, scores, stops and grammars in the same steps; and after preemptions, where V2
    forgets a request and is given it anew."""
    for seed, name in enumerate(("first", "second")):
        text.adapter(tmp_path / name, EVERYTHING, 4, seed)
    folders = [str(text.folder), *(str(tmp_path / name) for name in ("first", "second"))]
    running = {name: start(name, [*folders, str(tmp_path / name)]) for name in ("0", "1")}
    for name, process in running.items():
        output, _ = process.communicate()
        assert process.returncode == 0, (name, output)
    old, new = (json.loads((tmp_path / name).read_text()) for name in ("0", "1"))
    assert old["runner"] == "vllm.v1.worker.cpu_model_runner"
    assert new["runner"] == "vllm.v1.worker.cpu.model_runner"
    same(old["answers"], new["answers"])
    assert old["preempted"]["preemptions"] > 0
    assert new["preempted"]["preemptions"] > 0
    same(old["preempted"]["answers"], new["preempted"]["answers"])


def test_a_runner_that_is_not_to_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "2")
    with pytest.raises(UnsupportedError, match="expected 0 or 1, got '2'"):
        compat_vllm.check_model_runner()
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "1")
    monkeypatch.setattr(compat_vllm, "_distribution_version", lambda: (0, 26))
    with pytest.raises(UnsupportedError, match=r"needs vLLM 0\.32, and 0\.26 is installed"):
        compat_vllm.check_model_runner()
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "0")
    compat_vllm.check_model_runner()


def test_on_a_cpu_v2_has_to_be_started_with_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(triton_on_cpu.INTERPRETER, raising=False)
    with pytest.raises(UnsupportedError, match="needs TRITON_INTERPRET=1, and is ten to fifty times as slow"):
        triton_on_cpu.interpret()
    program = "import os, triton.language\nos.environ['TRITON_INTERPRET'] = '1'\n" + LATE
    environment = {name: value for name, value in os.environ.items() if name != triton_on_cpu.INTERPRETER}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "TRITON_INTERPRET=1 was set after Triton had been imported" in done.stdout


def test_the_table_says_what_v2_needs_of_each_patch() -> None:
    of = {runner: [patch for patch in PATCHES if patch.runner == runner] for runner in ("both", "V1", "V2")}
    assert all(patch.on_v2 for patch in of["V1"])
    assert not any(patch.on_v2 for patch in of["V2"])
    hooks = {runner: {patch.used_in[0] for patch in of[runner]} for runner in ("V1", "V2")}
    assert hooks == {"V1": {"runner_v1.py"}, "V2": {"runner_v2.py", "triton_on_cpu.py"}}
    assert len({name for patch in of["V2"] for name in patch.names}) < len(
        {name for patch in of["V1"] for name in patch.names}
    ), "V2 is hooked in fewer places"
    folder = Path(importlib.util.find_spec("vllm").origin).parent / "v1/worker"  # type: ignore[union-attr, arg-type]
    named = {file for patch in PATCHES for file in re.findall(r"gpu/[\w/]+\.py", patch.on_v2)}
    assert len(named) > 5
    assert {file for file in named if not (folder / file).is_file()} == set()
