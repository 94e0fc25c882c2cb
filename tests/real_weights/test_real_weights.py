"""What only real weights show: real text at every position, and answers that are right in style and in fact."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import numpy.typing as npt
import openai
import pytest
import tinker
import torch
from tinker import types
from tinker_local.backend.exporting import export_checkpoint
from transformers import AutoModelForCausalLM

from tests.conftest import Server, start_server
from tests.float64 import TIMES
from tests.real_weights.conftest import NAME, Reference

pytestmark = pytest.mark.more

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = README.parent / "examples"
CAPITALS = {"France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}


def example(tokenizer: Any, land: str, city: str) -> types.Datum:
    """A question for a capital, and the answer of a pirate, which alone has weight."""
    before, after = asked(tokenizer, land), tokenizer.encode(f"Arr! It be {city}, matey.<|im_end|>")
    weights = np.array([0.0] * (len(before) - 1) + [1.0] * len(after), np.float32)
    inputs: Any = {"target_tokens": np.array((before + after)[1:]), "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints((before + after)[:-1]), loss_fn_inputs=inputs)


def asked(tokenizer: Any, land: str) -> list[int]:
    messages = [{"role": "user", "content": f"What is the capital of {land}?"}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def trained_on_pirates(service: tinker.ServiceClient, tokenizer: Any, steps: int) -> tinker.TrainingClient:
    client = service.create_lora_training_client(base_model=NAME, rank=16, seed=0).result()
    train(client, tokenizer, steps)
    return client


def train(client: tinker.TrainingClient, tokenizer: Any, steps: int) -> list[float]:
    """The loss of each of `steps`."""
    data = [example(tokenizer, land, city) for land, city in CAPITALS.items()]
    losses = []
    for _ in range(steps):
        passed = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(float(passed.result().metrics["loss:sum"]))
    return losses


def trainers(client: tinker.TrainingClient, *texts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Logprobs of each token after the first of each text, by the trainer."""
    data = []
    for ids in texts:
        inputs: Any = {"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1].tolist()), loss_fn_inputs=inputs))
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return np.concatenate([each["logprobs"].to_numpy() for each in outputs]).astype(np.float64)


def samplers(sampler: tinker.SamplingClient, *texts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    futures = [sampler.compute_logprobs(types.ModelInput.from_ints(ids.tolist())) for ids in texts]
    return np.concatenate([np.array(future.result()[1:], np.float64) for future in futures])


def test_the_first_program_teaches_a_style_and_keeps_the_facts(small_server: Server) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "first_program.py")],
        env={**os.environ, "TINKER_BASE_URL": small_server.url},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = done.stdout.split("after:\n")
    assert "Arr!" not in before
    assert after.splitlines() == [
        f"  {land}: Arr! It be {city}, matey."
        for land, city in {
            "Poland": "Warsaw",
            "Sweden": "Stockholm",
            "Hungary": "Budapest",
            "Belgium": "Brussels",
        }.items()
    ]


def test_the_program_of_readme_prints_what_readme_says(small_server: Server) -> None:
    text = README.read_text()
    program = text.partition("```python\n")[2].partition("```\n")[0]
    done = subprocess.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:8000", small_server.url)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = text.partition("It prints `")[2].partition("`")[0]
    assert (done.returncode, done.stdout) == (0, f"{said}\n"), done.stderr
    assert "deprecated" not in done.stderr


@pytest.mark.rotated(2)
def test_all_positions_of_the_context_agree_with_transformers(
    service: tinker.ServiceClient, small_server: Server, reference: Reference, real_text: npt.NDArray[np.int64]
) -> None:
    """The first thousand tokens are judged in float64. What the others may differ by is what float32 moves there."""
    assert any(line.endswith("; serves contexts of up to 8192 positions") for line in small_server.lines)
    whole = real_text[:8192]
    client = service.create_lora_training_client(base_model=NAME, rank=8, seed=0).result()
    found = {
        "trainer": trainers(client, whole),
        "sampler": samplers(service.create_sampling_client(base_model=NAME), whole[:8191]),
    }
    theirs = reference.logprobs(torch.float32, whole)
    exact = reference.logprobs(torch.float64, whole[:1024])
    rounding = float(np.abs(theirs[: len(exact)] - exact).max())
    for name, values in found.items():
        assert np.abs(values[: len(exact)] - exact).max() <= TIMES * rounding, name
        assert np.abs(values - theirs[: len(values)]).max() <= TIMES * rounding, name


def test_samples_have_the_logprobs_of_the_trainer(
    service: tinker.ServiceClient, tokenizer: Any, reference: Reference
) -> None:
    """Of an adapter in training: KL(sampler, trainer). What float32 moves is measured on the same texts."""
    client = trained_on_pirates(service, tokenizer, 2)
    sampler = client.save_weights_and_get_sampling_client()
    prompts = [asked(tokenizer, land) for land in ("Poland", "Sweden", "Chile", "India")]
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), 4, params) for prompt in prompts]
    texts, drawn = [], []
    for prompt, future in zip(prompts, futures, strict=True):
        for sequence in future.result().sequences:
            texts.append(np.array([*prompt, *sequence.tokens], np.int64))
            assert sequence.logprobs is not None
            drawn.append(np.array(sequence.logprobs))
    scored = np.split(trainers(client, *texts), np.cumsum([len(ids) - 1 for ids in texts])[:-1])
    differences = np.concatenate(
        [of_sampler - of_trainer[-len(of_sampler) :] for of_sampler, of_trainer in zip(drawn, scored, strict=True)]
    )
    assert len(differences) > 200
    single, exact = (reference.logprobs(dtype, *texts) for dtype in (torch.float32, torch.float64))
    assert np.abs(differences).max() <= TIMES * np.abs(single - exact).max()
    assert abs(differences.mean()) <= TIMES * np.abs(single - exact).mean()


def test_openai_and_anthropic_clients_get_the_same_text_whole_and_streamed(small_server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Name three colours, with an emoji for each."}]
    settings: Any = {"model": NAME, "messages": messages, "max_tokens": 48, "temperature": 0.7, "seed": 4}
    with openai.OpenAI(base_url=f"{small_server.url}/v1", api_key="tml-any", max_retries=0) as client:
        whole = client.chat.completions.create(**settings, logprobs=True).choices[0]
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**settings, stream=True)
        )
        text = whole.message.content or ""
        assert streamed == text
        assert len(text.encode()) > 20
        assert whole.logprobs is not None
        entries = whole.logprobs.content or []
        # Byte-level tokens: an emoji is several, none of which is text by itself.
        of_entries = b"".join(bytes(entry.bytes or []) for entry in entries)
        assert of_entries.decode(errors="replace").removesuffix("<|im_end|>").startswith(text)
        middle = text[len(text) // 2 : len(text) // 2 + 3]
        stopped = client.chat.completions.create(**settings, stop=middle).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == (text[: text.index(middle)], "stop")
    with anthropic.Anthropic(base_url=small_server.url, api_key="tml-any", max_retries=0) as claude:
        asked_for: Any = {"model": NAME, "messages": messages, "max_tokens": 48, "extra_body": {"temperature": 0.0}}
        block = claude.messages.create(**asked_for).content[0]
        assert block.type == "text"
        with claude.messages.stream(**asked_for) as stream:
            assert "".join(stream.text_stream) == block.text


@pytest.mark.parametrize("layout", ["peft", "merged"])
def test_exports_answer_the_same_in_transformers(
    layout: Any,
    service: tinker.ServiceClient,
    small_server: Server,
    small_model: Path,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    client = trained_on_pirates(service, tokenizer, 6)
    prompt = asked(tokenizer, "France")
    path = client.save_weights_for_sampler("pirate").result().path
    sampler = service.create_sampling_client(model_path=path)
    greedy = types.SamplingParams(max_tokens=16, temperature=0.0, stop=["<|im_end|>"])
    ours = sampler.sample(types.ModelInput.from_ints(prompt), 1, greedy).result().sequences[0].tokens
    data = small_server.data_dir
    export_checkpoint(path, tmp_path / "out", to=layout, base=str(small_model), data_dir=data)
    if layout == "peft":
        import peft

        base = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
        model: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "out"))
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    given = torch.tensor([prompt])
    with torch.no_grad():
        theirs = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=16, do_sample=False)
    assert theirs[0, len(prompt) :].tolist()[: len(ours)] == list(ours)
    assert "Paris, matey" in tokenizer.decode(ours)


@pytest.mark.rotated(2)
def test_a_killed_server_goes_on_from_the_saved_state(small_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Saved after two steps, killed after three: the third and fourth are then what they would have been."""
    options = (tmp_path / "data", "--model", f"{NAME}={small_model}")
    server = start_server(*options)
    # Not closed: that would try for minutes to reach the server that was killed.
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
    client = trained_on_pirates(service, tokenizer, 2)
    path = client.save_state("two").result().path
    first = train(client, tokenizer, 2)
    server.kill()
    server = start_server(*options)
    with tinker.ServiceClient(base_url=server.url, api_key="tml-local") as service:
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        again = train(resumed, tokenizer, 2)
    server.stop()
    assert again == first
