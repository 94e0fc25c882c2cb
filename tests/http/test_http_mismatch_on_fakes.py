"""How far sampler and trainer are apart: in results, in the curve, at `/metrics`, in `tinker-local status` and in the
log; and how stale the weights are that sampled."""

import asyncio
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from click.testing import CliRunner
from tinker_local import client
from tinker_local.backend.cli.main import main
from tinker_local.backend.control import mismatch, training_commands
from tinker_local.types import Datum, ModelInput, ProvenanceSpan

from tests.conftest import Server
from tests.http.conftest import BASE, Api, StartApi
from tests.http.test_http_progress_on_fakes import lines_of, run_of
from tests.http.test_http_server_metrics_on_fakes import read

PROMPT = [5, 9, 20]


async def sampled(api: Api, sampler: str, seq_id: int, count: int = 3, **fields: Any) -> list[Datum]:
    """Data of `count` sequences, with spans, as the cookbook makes them of one turn."""
    request_id = await api.sample(sampler, seq_id, PROMPT, num_samples=count, **fields)
    output = await api.result(request_id)
    data = []
    for at, sequence in enumerate(output.sequences):
        tokens, before, name = [int(token) for token in sequence.tokens], len(PROMPT) - 1, f"{request_id}:{at}"
        inputs = {
            "target_tokens": [*PROMPT[1:], *tokens],
            "logprobs": [0.0] * before + [float(value) for value in sequence.logprobs],
            "advantages": [0.0] * before + [(-1.0) ** at] * len(tokens),
        }
        data.append(
            Datum(
                model_input=ModelInput.from_ints([*PROMPT, *tokens[:-1]]),
                loss_fn_inputs=inputs,
                model_input_spans=[
                    ProvenanceSpan(source="prompt", sequence_id=name, length=len(PROMPT)),
                    ProvenanceSpan(source="sampled", sequence_id=name, length=len(tokens) - 1),
                ],
                loss_fn_input_spans=[
                    ProvenanceSpan(source="prompt", sequence_id=name, offset=1, length=before),
                    ProvenanceSpan(source="sampled", sequence_id=name, length=len(tokens)),
                ],
            )
        )
    return data


def log_ratios(data: Sequence[Any], outputs: Sequence[Any]) -> list[float]:
    """l - q of each sampled token, from what was sent and what came back."""
    found: list[float] = []
    for datum, output in zip(data, outputs, strict=True):
        trained, sent = output["logprobs"].to_numpy(), datum.loss_fn_inputs["logprobs"].to_numpy()
        found += [float(one) - float(other) for one, other in zip(trained, sent, strict=True) if other]
    return found


def kl_of(log_ratio: Sequence[float]) -> float:
    return sum(math.exp(value) - 1 - value for value in log_ratio) / len(log_ratio)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "stable_reinforce"])
@pytest.mark.parametrize("kind", ["nameless", "named"])
async def test_steps_tell_the_distance_by_how_stale_the_sampler_is_on_fakes(api: Api, kind: str, loss_fn: str) -> None:
    """Of stable_reinforce by records; of another loss, whose samples are not recorded, by the ids of sequences."""
    session = await api.session()
    model, other = await api.model(session, 0), await api.model(session, 1)
    if kind == "nameless":
        sampler = await api.nameless(model, 1, 0)
    else:
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": await api.named(model, 1, "a")}
        sampler = (await api.ok("create_sampling_session", body))["sampling_session_id"]
    data = await sampled(api, sampler, 0, record_stability_info=loss_fn == "stable_reinforce")
    tokens = sum(len(datum.loss_fn_inputs["target_tokens"].to_numpy()) - len(PROMPT) + 1 for datum in data)
    seq, seen = itertools.count(2), []
    for group in ("staleness_0", "staleness_1", "staleness_2", "staleness_3_on", "staleness_3_on"):
        output = await api.result(await api.gradient(model, next(seq), data, loss_fn))
        found = (await api.result(await api.step(model, next(seq), learning_rate=0.2)))["metrics"]
        log_ratio = log_ratios(data, output.loss_fn_outputs)
        names = [name for name in found if name != "grad_norm"]
        assert set(names) == {
            f"mismatch/{measure}{suffix}" for measure in mismatch.MEASURES for suffix in ("", f"/{group}")
        }
        assert found["mismatch/tokens"] == found[f"mismatch/tokens/{group}"] == len(log_ratio) == tokens
        assert found["mismatch/kl"] == pytest.approx(kl_of(log_ratio), rel=1e-9, abs=1e-15)
        assert found["mismatch/largest_ratio"] == pytest.approx(math.exp(max(log_ratio)))
        assert found["mismatch/beyond_share"] == sum(abs(math.exp(each) - 1) > 0.2 for each in log_ratio) / tokens
        assert output.metrics["mismatch/tokens:sum"] == tokens
        assert output.metrics["mismatch/kl:sum"] == pytest.approx(tokens * found["mismatch/kl"])
        seen.append(found["mismatch/kl"])
    assert seen[0] < 1e-9
    assert seen[-1] > 1e-3
    # Nothing is known of how far a run is from the weights of another one.
    await api.result(await api.gradient(other, 1, data, loss_fn))
    found = (await api.result(await api.step(other, 2)))["metrics"]
    assert found.keys() == {"grad_norm", *(f"mismatch/{measure}" for measure in mismatch.MEASURES)}


async def test_a_step_tells_of_its_own_gradient_alone_on_fakes(api: Api) -> None:
    """Not of `forward`, of another step, of a loss without a sampler, or of what was discarded."""
    model = await api.model()
    data = await sampled(api, await api.nameless(model, 1, 0), 0)
    assert not [name for name in (await api.result(await api.gradient(model, 2))).metrics if "mismatch" in name]
    await api.result(await api.gradient(model, 3, data, "importance_sampling"))
    await api.failure(await api.gradient(model, 4, loss_fn="nonsense"))
    assert "discarded" in await api.failure(await api.step(model, 5))
    forward = await api.result(await api.gradient(model, 6, data, "ppo", forward_only=True))
    assert forward.metrics["mismatch/tokens:sum"] > 0
    await api.result(await api.gradient(model, 7))
    assert (await api.result(await api.step(model, 8))).keys() == {"metrics"}
    assert "mismatch" not in (await lines_of(api, model))[0]
    for seq_id, part, loss_fn in ((9, data[:1], "ppo"), (10, data[1:], "cispo")):
        await api.result(await api.gradient(model, seq_id, part, loss_fn))
    found = (await api.result(await api.step(model, 11, learning_rate=0.2)))["metrics"]
    assert found["mismatch/tokens"] == forward.metrics["mismatch/tokens:sum"]
    assert found["mismatch/tokens/staleness_1"] == found["mismatch/tokens"]
    newer = await sampled(api, await api.nameless(model, 12, 1), 0, 1)
    await api.result(await api.gradient(model, 13, [*data, *newer], "dro"))
    found = (await api.result(await api.step(model, 14)))["metrics"]
    both = found["mismatch/tokens/staleness_0"] + found["mismatch/tokens/staleness_2"]
    assert found["mismatch/tokens"] == both
    assert found["mismatch/kl/staleness_0"] < 1e-9 < found["mismatch/kl/staleness_2"]


async def test_the_curve_status_and_metrics_have_the_distance_in_numbers_alone_on_fakes(start_api: StartApi) -> None:
    api = await start_api()
    model = await api.model()
    data = await sampled(api, await api.nameless(model, 1, 0), 0)
    for seq_id in (2, 4):
        await api.result(await api.gradient(model, seq_id, data, "importance_sampling"))
        stepped = await api.result(await api.step(model, seq_id + 1, learning_rate=0.2))
    first, last = await lines_of(api, model)
    assert first["mismatch"].keys() == {"all", "staleness_0"}
    assert last["mismatch"].keys() == {"all", "staleness_1"}
    assert last == (await run_of(api, model))["last"]
    for group, found in last["mismatch"].items():
        assert list(found) == list(mismatch.MEASURES)
        assert all(isinstance(value, float) and math.isfinite(value) for value in found.values())
        for measure, value in found.items():
            suffix = "" if group == "all" else f"/{group}"
            assert value == pytest.approx(stepped["metrics"][f"mismatch/{measure}{suffix}"], rel=1e-4)
    assert len(json.dumps(last["mismatch"])) < 250
    exported = await read(api)
    for measure in mismatch.MEASURES:
        assert exported[f"run_mismatch_{measure}"] == {
            (group, "local", model): found[measure] for group, found in last["mismatch"].items()
        }
    await api.result(await api.gradient(model, 6))
    await api.result(await api.step(model, 7))
    assert "run_mismatch_kl" not in await read(api)


async def test_the_log_says_once_when_the_sampler_is_further_than_it_was_on_fakes(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    model = await api.model()
    data = await sampled(api, await api.nameless(model, 1, 0), 0)
    for seq_id in range(2, 12, 2):
        await api.result(await api.gradient(model, seq_id, data, "importance_sampling"))
        await api.result(await api.step(model, seq_id + 1, learning_rate=0.2))
    (said,) = [line for line in caplog.messages if "nats per token apart" in line]
    assert said.startswith(f"run {model}: step ")
    assert "of the first 1 on-policy steps" in said
    assert "100% were sampled by older weights" in said


async def test_measuring_is_off_the_loop_and_a_step_waits_for_it_on_fakes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    data = await sampled(api, await api.nameless(model, 1, 0), 0)
    threads = []

    def slowly(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        time.sleep(0.3)
        return mismatch.measure(*args)

    monkeypatch.setattr(training_commands, "measure", slowly)
    gradient, step = await api.gradient(model, 2, data, "importance_sampling"), await api.step(model, 3)
    assert (await api.result(step))["metrics"]["mismatch/tokens"] > 0
    assert (await api.result(gradient)).metrics["mismatch/tokens:sum"] > 0
    assert all(name.startswith("encode") for name in threads)

    def wrongly(*args: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(training_commands, "measure", wrongly)
    assert "server: " in await api.failure(await api.gradient(model, 4, data, "importance_sampling"))
    assert "discarded" in await api.failure(await api.step(model, 5))


def test_metrics_of_a_call_in_several_requests_are_those_of_all_its_tokens_on_fakes(fake_server: Server) -> None:
    """The SDK cuts a call after 1,024 data, and combines metrics by the suffix of their names."""
    with client.ServiceClient(base_url=fake_server.url) as service:
        run = service.create_lora_training_client(BASE, rank=4)
        rng = np.random.default_rng(0)
        data = []
        for at in range(1030):
            mask = (np.arange(4) >= (1 if at < 1024 else 4)).astype(np.float32)  # nothing was sampled for the last ones
            inputs = {
                "target_tokens": tinker.TensorData(data=rng.integers(3, 60, 4).tolist(), dtype="int64"),
                "logprobs": tinker.TensorData(data=(rng.normal(-4, 1, 4) * mask).tolist(), dtype="float32"),
                "advantages": tinker.TensorData(data=mask.tolist(), dtype="float32"),
            }
            given = tinker.ModelInput.from_ints(rng.integers(3, 60, 4).tolist())
            data.append(tinker.Datum(model_input=given, loss_fn_inputs=inputs))
        output = run.forward_backward(data, "ppo").result()
        log_ratio = log_ratios(data, output.loss_fn_outputs)
        assert len(log_ratio) == 3 * 1024
        wanted = {
            "mismatch/kl:sum": len(log_ratio) * kl_of(log_ratio),
            "mismatch/tokens:sum": len(log_ratio),
            "mismatch/beyond:sum": sum(abs(math.exp(each) - 1) > 0.2 for each in log_ratio),
            "mismatch/largest_ratio:max": math.exp(max(log_ratio)),
        }
        assert {name: output.metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
        stepped = run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result().metrics or {}
        assert stepped["mismatch/kl"] == pytest.approx(kl_of(log_ratio), rel=1e-9)
        assert "mismatch/kl/text" not in stepped
        for columns in ("200", "80"):
            shown = CliRunner().invoke(main, ["status", "--url", fake_server.url], env={"COLUMNS": columns})
            assert f"{stepped['mismatch/kl']:.4g}" in shown.output
            assert "KL" in shown.output


def test_a_client_may_send_any_finite_logprob_on_fakes(fake_server: Server) -> None:
    """Where nothing is trained; results and curves stay JSON."""
    with client.ServiceClient(base_url=fake_server.url) as service:
        run = service.create_lora_training_client(BASE, rank=4)
        inputs = {
            "target_tokens": tinker.TensorData(data=[4, 5], dtype="int64"),
            "logprobs": tinker.TensorData(data=[-3.4e38, -1.0], dtype="float32"),
            "advantages": tinker.TensorData(data=[0.0, 1.0], dtype="float32"),
        }
        data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([3, 4]), loss_fn_inputs=inputs)]
        run.forward_backward(data, "importance_sampling").result()
        found = run.optim_step(tinker.AdamParams()).result().metrics or {}
        assert all(math.isfinite(value) for value in found.values())
        assert found["mismatch/largest_ratio"] > 1e100


def test_the_loops_with_truncated_ratios_are_what_their_page_says_on_fakes(fake_server: Server) -> None:
    """The blocks of docs/losses.md: cispo is -min(r, 2) l A, and ppo gets advantages times min(r, 2)."""
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    cispo, loop = re.findall(r"```python\n(.*?)```", page[page.index("### Truncated ratios") :], re.DOTALL)[:2]
    with client.ServiceClient(base_url=fake_server.url) as service:
        run = service.create_lora_training_client(BASE, rank=4)
        sampler = run.save_weights_and_get_sampling_client()
        prompt, params = tinker.ModelInput.from_ints(PROMPT), tinker.SamplingParams(max_tokens=5, seed=1)
        data: list[tinker.Datum] = []
        for sequence in sampler.sample(prompt, 4, params).result().sequences:
            tokens, before = list(sequence.tokens), len(PROMPT) - 1
            sent = np.array(sequence.logprobs, np.float32) + np.linspace(-1.5, 0.5, len(tokens), dtype=np.float32)
            inputs = {
                "target_tokens": np.array([*PROMPT[1:], *tokens]),
                "logprobs": np.concatenate([np.zeros(before, np.float32), sent]),
                "advantages": np.array([0.0] * before + [2.0 - len(data)] * len(tokens), np.float32),
            }
            given = tinker.ModelInput.from_ints([*PROMPT, *tokens[:-1]])
            data.append(tinker.Datum(model_input=given, loss_fn_inputs=inputs))
        names: dict[str, Any] = {"run": run, "data": data}
        output = eval(cispo, names).result()
        wanted = 0.0
        for datum, found in zip(data, output.loss_fn_outputs, strict=True):
            trained = found["logprobs"].to_numpy().astype(float)
            advantages, sent = (datum.loss_fn_inputs[name].to_numpy() for name in ("advantages", "logprobs"))
            wanted -= float((np.minimum(np.exp(trained - sent), 2) * trained * advantages).sum())
        assert output.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-5)
        run.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
        exec(loop, names)
        cut = 0
        for datum, found, changed in zip(data, output.loss_fn_outputs, names["batch"], strict=True):
            advantages, sent = (datum.loss_fn_inputs[name].to_numpy() for name in ("advantages", "logprobs"))
            ratio = np.exp(found["logprobs"].to_numpy() - sent)
            cut += int(((ratio > 2) & (advantages != 0)).sum())
            np.testing.assert_allclose(
                changed.loss_fn_inputs["advantages"].to_numpy(), advantages * np.minimum(ratio, 2), rtol=1e-5
            )
        assert cut > 3
        assert names["step"].result().metrics["mismatch/kl"] < 1e-6, "the trainer and itself"


@pytest.mark.more
def test_the_cookbooks_step_and_logger_have_the_distance_on_fakes(fake_server: Server, tmp_path: Path) -> None:
    """Beside what the cookbook computes of it: k1, and k2, which is k3 where both nearly agree."""
    from tinker_cookbook.rl.metrics import compute_kl_sample_train
    from tinker_cookbook.rl.train import train_step
    from tinker_cookbook.utils.ml_log import JsonLogger

    with client.ServiceClient(base_url=fake_server.url) as service:
        run: Any = service.create_lora_training_client(BASE, rank=4)
        sampler = run.save_weights_and_get_sampling_client()
        prompt, params = tinker.ModelInput.from_ints(PROMPT), tinker.SamplingParams(max_tokens=6, seed=1)
        data = []
        for at, sequence in enumerate(sampler.sample(prompt, 8, params).result().sequences):
            tokens, before, name = list(sequence.tokens), len(PROMPT) - 1, sequence.sequence_id
            mask = np.array([0.0] * before + [1.0] * len(tokens), np.float32)
            inputs = {
                "target_tokens": np.array([*PROMPT[1:], *tokens]),
                "logprobs": np.array([0.0] * before + list(sequence.logprobs), np.float32),
                "advantages": mask * (-1) ** at,
                "mask": mask,
            }
            given = tinker.ModelInput.from_ints([*PROMPT, *tokens[:-1]])
            datum = tinker.Datum(model_input=given, loss_fn_inputs=inputs)
            of_prompt, of_tokens = tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan
            data.append(
                datum.with_provenance(
                    model_input=[
                        of_prompt(sequence_id=name, length=len(PROMPT)),
                        of_tokens(sequence_id=name, length=len(tokens) - 1),
                    ],
                    loss_fn_inputs=[
                        of_prompt(sequence_id=name, offset=1, length=before),
                        of_tokens(sequence_id=name, length=len(tokens)),
                    ],
                )
            )
        logger = JsonLogger(tmp_path)
        for step in range(2):
            metrics: dict[str, Any] = {}
            trained = asyncio.run(train_step(data, run, 1e-3, 1, "importance_sampling", metrics=metrics))
            logger.log_metrics({**metrics, **compute_kl_sample_train(data, trained)}, step)
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["mismatch/tokens/staleness_0"] == second["mismatch/tokens/staleness_1"] > 8
    assert 0 < second["mismatch/kl"] < 1e-2
    assert second["mismatch/kl"] == pytest.approx(second["optim/kl_sample_train_v2"], rel=0.1)
    assert first["mismatch/kl"] < second["mismatch/kl"] / 100
