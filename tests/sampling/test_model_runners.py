"""vLLM's two model runners give the same tokens and logprobs; on a CPU, V2 runs in Triton's interpreter."""

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.vllm_engine import compat_vllm, triton_on_cpu
from tinker_local.backend.vllm_engine.build_engine import (
    EngineOptions,
    build_engine,
    prepare_environment,
    process_state_kept,
)
from tinker_local.backend.vllm_engine.draw_tokens import lower
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


VOCABULARY = 50


def v2_sampler(monkeypatch: pytest.MonkeyPatch, *, prompts: list[int], prefills: list[int]) -> Any:
    """With slots of the lengths of prompts, and of what is to be computed: the prompt and what was sampled before a
    preemption. Tokens are the slot's number times ten and more."""
    prepare_environment()
    with process_state_kept():
        from tinker_local.backend.vllm_engine.runner_v2 import FullVocabularySampler
        from vllm.v1.worker.gpu import buffer_utils

        monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
        ids = torch.arange(8).expand(len(prompts), -1) + 10 * torch.arange(len(prompts))[:, None]
        states = SimpleNamespace(
            prompt_len=SimpleNamespace(np=np.array(prompts)),
            prefill_len=SimpleNamespace(np=np.array(prefills)),
            all_token_ids=SimpleNamespace(gpu=ids),
        )
        return FullVocabularySampler(
            max_num_reqs=len(prompts), vocab_size=VOCABULARY, device=torch.device("cpu"), req_states=states
        )


def params(**given: Any) -> Any:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "seed": None}
    return SimpleNamespace(**{**plain, "presence_penalty": 0.0, "frequency_penalty": 0.0, **given})


def step(slots: list[int], computed: list[int], scheduled: list[int], prefills: list[int]) -> Any:
    return SimpleNamespace(
        idx_mapping_np=np.array(slots),
        idx_mapping=torch.tensor(slots),
        num_computed_prefill_tokens_np=np.array(computed),
        num_scheduled_tokens=np.array(scheduled),
        prefill_len_np=np.array(prefills),
        seq_lens_cpu_upper_bound=torch.tensor(computed) + torch.tensor(scheduled),
    )


@pytest.mark.skipif(not compat_vllm.runs_on_cpu(), reason="asks for tensors of a CPU")
def test_v2_gives_a_request_that_comes_back_its_next_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none to a request whose prompt goes on in the next step, or that has no seed."""
    sampler = v2_sampler(monkeypatch, prompts=[3, 3, 3, 6], prefills=[3, 5, 3, 6])
    for slot, seed in enumerate((7, 7, None, 7)):
        sampler.add_request(slot, params(seed=seed))
    sampler.apply_staged_writes()
    asked = sampler._asked(step([1, 3, 2, 0], [0, 0, 0, 0], [5, 4, 3, 3], [5, 6, 3, 3]))
    assert asked.generators.keys() == {0, 3}
    assert not asked.some_greedy
    fresh = [torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))]
    again, first = (torch.rand((), dtype=torch.float64, generator=asked.generators[row]) for row in (0, 3))
    assert first == fresh[0][0]
    assert again == fresh[0][2], "it had sampled two tokens"


@pytest.mark.skipif(not compat_vllm.runs_on_cpu(), reason="asks for tensors of a CPU")
def test_v2_asks_for_what_the_requests_in_its_slots_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is another request's after the first one's, and before any the profile takes it for one that asks for
    much. Penalties count what was sampled alone."""
    sampler = v2_sampler(monkeypatch, prompts=[2, 2, 2], prefills=[2, 2, 2])
    whole = sampler._asked(step([0, 1, 2], [0, 0, 0], [2, 2, 2], [0, 0, 0]))
    assert whole.top_p_b is not None
    assert whole.widths == {0: 1, 1: 1, 2: 1}
    sampler.add_request(0, params(temperature=0.0))
    sampler.add_request(1, params(temperature=0.5, top_k=9, top_p=0.3, logprobs=4, seed=1))
    sampler.add_request(2, params(presence_penalty=1.0, frequency_penalty=0.5))
    sampler.apply_staged_writes()
    asked = sampler._asked(step([2, 1, 0], [4, 0, 0], [1, 2, 2], [2, 2, 2]))
    assert asked.temperature_b.tolist() == [1.0, 0.5, 0.0]
    assert asked.some_greedy
    assert asked.top_k_b.tolist() == [VOCABULARY, 9, VOCABULARY]
    assert asked.top_p_b.tolist() == pytest.approx([1.0, 0.3, 1.0])
    assert asked.widths == {1: 4}
    logits = torch.zeros(3, VOCABULARY)
    asked.lower(logits)
    lowered = torch.zeros(3, VOCABULARY)
    lower(lowered, np.float32([1, 0, 0]), np.float32([0.5, 0, 0]), [[22, 23, 24], [], []])
    assert torch.equal(logits, lowered)
    sampler.add_request(1, params())
    plain = sampler._asked(step([1], [0], [2], [2]))
    assert plain.plain
    assert not plain.some_greedy
    assert sampler._asked(step([0], [0], [2], [2])).temperature_b is None


def test_a_runner_that_is_not_to_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "2")
    with pytest.raises(UnsupportedError, match="expected 0 or 1, got '2'"):
        compat_vllm.choose_model_runner()
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "1")
    monkeypatch.setattr(compat_vllm, "_distribution_version", lambda: (0, 26))
    with pytest.raises(UnsupportedError, match=r"=1 needs vLLM 0\.32, and 0\.26 is installed; 0 samples with it"):
        compat_vllm.choose_model_runner()
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "0")
    compat_vllm.choose_model_runner()


@pytest.mark.parametrize(
    ("version", "on_cpu", "runner"), [((0, 26), False, "0"), ((0, 32), True, "0"), ((0, 32), False, "1")]
)
def test_v2_is_taken_where_it_is_known_and_fast(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], on_cpu: bool, runner: str
) -> None:
    """And what the user says holds."""
    monkeypatch.setattr(compat_vllm, "_distribution_version", lambda: version)
    monkeypatch.setattr(compat_vllm, "runs_on_cpu", lambda: on_cpu)
    monkeypatch.delenv(compat_vllm.MODEL_RUNNER, raising=False)
    assert compat_vllm.uses_v2() == (runner == "1")
    compat_vllm.choose_model_runner()
    assert os.environ[compat_vllm.MODEL_RUNNER] == runner
    assert compat_vllm.uses_v2() == (runner == "1")
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "0")
    compat_vllm.choose_model_runner()
    assert not compat_vllm.uses_v2()


def test_on_a_cpu_v2_has_to_be_started_with_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(triton_on_cpu.INTERPRETER, raising=False)
    with pytest.raises(UnsupportedError, match="needs TRITON_INTERPRET=1, and is ten to fifty times as slow"):
        triton_on_cpu.interpret()
    program = "import os, triton.language\nos.environ['TRITON_INTERPRET'] = '1'\n" + LATE
    environment = {name: value for name, value in os.environ.items() if name != triton_on_cpu.INTERPRETER}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "TRITON_INTERPRET=1 was set after Triton had been imported" in done.stdout


@pytest.mark.skipif(not compat_vllm.runs_on_cpu(), reason="refused without a GPU alone")
def test_an_engine_on_another_host_has_the_runner_that_the_server_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options travel there, and the environment does not."""
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "1")
    sent = pickle.dumps(EngineOptions("m"))
    monkeypatch.setenv(compat_vllm.MODEL_RUNNER, "0")
    monkeypatch.delenv(triton_on_cpu.INTERPRETER, raising=False)
    with pytest.raises(UnsupportedError, match=r"V2 .*needs TRITON_INTERPRET=1"):
        build_engine(pickle.loads(sent))


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
