"""Vision RL on real engines, through the SDK: what is trained is what was sampled, and failures stay alone."""

import asyncio
import functools
import urllib.request
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from prometheus_client.parser import text_string_to_metric_families
from tinker_local.client import rl

VISION = "tiny/vision"
TOLERANCE, DIVERGENCE = (0.5, 0.02) if torch.cuda.is_available() else (1e-4, 1e-6)  # bfloat16 there, float32 here

THINKING = """
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.content is string -%}
    {%- if message.role == 'assistant' and '</think>' in message.content -%}
      {{- message.content.split('</think>')[-1].lstrip('\n') -}}
    {%- else -%}{{- message.content -}}{%- endif -%}
  {%- else -%}
    {%- for part in message.content -%}
      {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""
"""Opens a thought for the model and forgets it after the turn."""


class Recorder:
    """A sampling client that keeps what it was given and gave."""

    def __init__(self, sampler: tinker.SamplingClient) -> None:
        self.sampler = sampler
        self.exchanges: dict[str, tuple[list[Any], list[int]]] = {}

    async def sample(self, prompt: tinker.ModelInput, count: int, params: tinker.SamplingParams) -> Any:
        response = await self.sampler.sample(prompt, count, params)
        for sequence in response.sequences:
            self.exchanges[sequence.sequence_id] = (elements(prompt), list(sequence.tokens))
        return response


class Album:
    """Random talk: `turns` replies, each followed by a text and 0 to 3 images of random sizes."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reset(self, *, seed: int | None = None) -> tuple[list[Any], dict[str, Any]]:
        self.rng = np.random.default_rng(seed)
        return self.observation(), {}

    def step(self, action: str) -> tuple[list[Any], float, bool, bool, dict[str, Any]]:
        self.turns -= 1
        return self.observation(), float(self.rng.integers(2)), self.turns == 0, False, {}

    def observation(self) -> list[Any]:
        parts: list[Any] = [f"Page {self.rng.integers(100)}. <|im_end|> "]
        for _ in range(self.rng.integers(4)):
            height, width = self.rng.integers(32, 130, 2)
            parts += [self.rng.integers(0, 256, (height, width, 3), dtype=np.uint8), " and "]
        return [*parts, "?"]


def elements(model_input: tinker.ModelInput) -> list[Any]:
    """Token ids, and the bytes of images."""
    flat: list[Any] = []
    for chunk in model_input.chunks:
        if isinstance(chunk, tinker.EncodedTextChunk):
            flat += chunk.tokens
        else:
            assert isinstance(chunk, tinker.types.ImageChunk)
            flat.append(chunk.data)
    return flat


def whole(datum: tinker.Datum) -> list[Any]:
    """The datum's sequence: its inputs and the last target."""
    return [*elements(datum.model_input), int(datum.loss_fn_inputs["target_tokens"].to_numpy()[-1])]


@pytest.fixture(scope="module")
def client(real_server: Any) -> tinker.TrainingClient:
    """A model whose adapter was trained a little, so that its logprobs are its own."""
    service = tinker.ServiceClient(base_url=real_server.url, api_key="tml-local")
    client = service.create_lora_training_client(base_model=VISION, rank=8, seed=1).result()
    chat = rl.Chat.of(client)
    data = rl.conversation_data(chat, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "red, no"}])
    for _ in range(4):
        client.forward_backward(data * 4, "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
    return client


@pytest.fixture(scope="module")
def sampler(client: tinker.TrainingClient) -> tinker.SamplingClient:
    return client.save_weights_and_get_sampling_client().result()


def logprob_gaps(client: tinker.TrainingClient, data: list[tinker.Datum]) -> list[float]:
    """Largest difference between the sampler's logprobs and the trainer's at sampled tokens, per datum."""
    output = client.forward(data, "importance_sampling").result()
    gaps = []
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        sampled = datum.loss_fn_inputs["advantages"].to_numpy() != 0
        difference = result["logprobs"].to_numpy() - datum.loss_fn_inputs["logprobs"].to_numpy()
        gaps.append(float(np.abs(difference[sampled]).max()))
    return gaps


async def test_trained_sequence_is_what_the_sampler_was_given_and_gave(
    client: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    recorder: Any = Recorder(sampler)
    groups = [rl.Group(functools.partial(Album, turns), 2, seed=turns) for turns in range(1, 7)]
    rollouts = await rl.rollout(groups, recorder, rl.Chat.of(client), tinker.SamplingParams(max_tokens=6))
    assert not rollouts.failures
    data = []
    for trajectory in rollouts.trajectories:
        (datum,) = trajectory.data(1.0)  # the template appends: one datum for the whole episode
        first, *later = [recorder.exchanges[turn.sequence_id] for turn in trajectory.turns]
        sequence = first[0] + first[1]
        for given, gave in later:
            assert given[: len(sequence)] == sequence  # nothing the model said was written anew
            sequence = given + gave
        assert whole(datum) == sequence
        data.append(datum)
    assert {len(trajectory.turns) for trajectory in rollouts.trajectories} == set(range(1, 7))
    assert max(trajectory.num_images for trajectory in rollouts.trajectories) > 6
    assert max(logprob_gaps(client, data)) < TOLERANCE
    assert rl.sampler_trainer_kl(data, client.forward(data, "importance_sampling").result()) < DIVERGENCE


async def test_thinking_model_trains_each_turn_as_it_was_shown(client: tinker.TrainingClient, real_server: Any) -> None:
    service = tinker.ServiceClient(base_url=real_server.url, api_key="tml-local")
    thinker = await service.create_lora_training_client_async(base_model=VISION, rank=16, seed=2)
    chat = rl.Chat(client.get_tokenizer(), rl.Chat.of(client).image_processor, template=THINKING)
    assert chat.prefill == "<think>\n"
    lessons = []
    for seed in range(8):  # a random model never ends a thought by itself
        album = Album(3)
        observations = [album.reset(seed=seed)[0], *(album.step("")[0] for _ in range(2))]
        talk = [{"role": "user", "content": observation} for observation in observations]
        said = {"role": "assistant", "content": "no</think>yes"}
        taught = rl.conversation_data(chat, [message for question in talk for message in (question, said)])
        assert len(taught) == 3
        lessons += taught
    for _ in range(16):
        await thinker.forward_backward(lessons, "cross_entropy")
        await thinker.optim_step(tinker.AdamParams(learning_rate=5e-3, grad_clip_norm=1.0))
    recorder: Any = Recorder(await thinker.save_weights_and_get_sampling_client())
    groups = [rl.Group(lambda: Album(3), 4, seed) for seed in range(3)]
    rollouts = await rl.rollout(groups, recorder, chat, tinker.SamplingParams(max_tokens=12))
    assert not rollouts.failures
    data, thoughts = [], 0
    for trajectory in rollouts.trajectories:
        expected: list[list[Any]] = []
        for turn in trajectory.turns:
            given, gave = recorder.exchanges[turn.sequence_id]
            if expected and given[: len(expected[-1])] == expected[-1]:  # no thought was dropped: it goes on
                expected[-1] = given + gave
            else:
                expected.append(given + gave)
        found = trajectory.data(1.0)
        assert [whole(datum) for datum in found] == expected
        closed = ["</think>" in chat.decode(turn.tokens, special=True) for turn in trajectory.turns]
        assert len(found) == 1 + sum(closed[:-1])
        thoughts += sum(closed)
        data += found
    assert thoughts > 12
    assert max(logprob_gaps(thinker, data)) < TOLERANCE


async def test_group_of_sixteen_renders_and_encodes_each_image_once(
    real_server: Any, client: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    class TwoPictures:
        def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
            self.rng, self.turns = np.random.default_rng(seed), 0
            return self.picture(), {}

        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.turns += 1
            return self.picture(), float(len(action) % 2), self.turns == 2, False, {}

        def picture(self) -> Any:
            return self.rng.integers(0, 256, (96, 64, 3), dtype=np.uint8)

    before = image_counts(real_server.url)
    for seed in (None, 3):  # siblings' first requests together, and each on its own
        params = tinker.SamplingParams(max_tokens=4, seed=seed)
        groups = [rl.Group(TwoPictures, 16, seed=11 if seed is None else 12)]
        rollouts = await rl.rollout(groups, sampler, rl.Chat.of(client), params)
        assert sum(trajectory.num_images for trajectory in rollouts.trajectories) == 32
        data = [datum for trajectory in rollouts.trajectories for datum in trajectory.data()]
        await client.forward(data, "importance_sampling")
    after = image_counts(real_server.url)
    assert {name: after[name] - before[name] for name in after} == {"rendered": 4, "sampler": 4, "trainer": 4}


def image_counts(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    counts = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("model") == VISION and sample.name == "tinker_local_images_rendered_total":
                counts["rendered"] = sample.value
            if sample.labels.get("model") == VISION and sample.name == "tinker_local_images_encoded_total":
                counts[sample.labels["side"]] = sample.value
    return counts


async def test_five_failures_end_their_own_trajectories_and_the_others_train(
    client: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    picture = np.zeros((64, 64, 3), np.uint8)
    chat = rl.Chat.of(client)
    chunk = tinker.types.ImageChunk(data=png(picture), format="png", expected_tokens=5)

    class Scripted:
        """Shows a picture, then `second`; an exception is raised."""

        def __init__(self, second: Any) -> None:
            self.second = second

        def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
            return ["Look: ", picture], {}

        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            if isinstance(self.second, Exception):
                raise self.second
            second, self.second = self.second, None
            return second, float(len(action)), second is None, False, {}

    seconds = {
        "expected_tokens": chunk,
        "raises": RuntimeError("the lights went out"),
        "broken": b"\x89PNG\r\n\x1a\nnothing",
        "overflow": "long " * 9000,
        "fine": "and now?",
    }
    groups = [rl.Group(functools.partial(Scripted, second), 4, 0) for second in seconds.values()]
    params = tinker.SamplingParams(max_tokens=5)
    rollouts = await rl.rollout(groups, sampler, chat, params, context_length=8192)
    told = dict(zip(seconds, rollouts.groups, strict=True))
    kinds = {name: {t.failure.kind if t.failure else t.end for t in group} for name, group in told.items()}
    assert kinds == {
        "expected_tokens": {"sampling"},
        "raises": {"environment"},
        "broken": {"observation"},
        "overflow": {"context"},
        "fine": {"terminated"},
    }
    reasons = {name: group[0].reason for name, group in told.items()}
    assert all(number in reasons["expected_tokens"] for number in ("5", "4"))
    assert "the lights went out" in reasons["raises"]
    assert "no image that can be read" in reasons["broken"]
    assert "8192" in reasons["overflow"]
    fine = [datum for trajectory in told["fine"] for datum in trajectory.data(0.5)]
    output = await client.forward_backward(fine, "importance_sampling")
    await client.optim_step(tinker.AdamParams(learning_rate=0.0))
    assert np.isfinite(output.metrics["loss:sum"])
    assert len(rollouts.data()) <= len(fine) + 4  # of the others only the truncated ones can count

    # Without a given context length, the service's own refusal is recognised too.
    alone = [rl.Group(lambda: Scripted("long " * 9000), 1, 0)]
    (trajectory,) = (await rl.rollout(alone, sampler, chat, params)).trajectories
    assert trajectory.end == "context"
    assert "8192" in trajectory.reason


def png(pixels: Any) -> bytes:
    from tinker_local.client import image_chunk

    return image_chunk(pixels).data


def test_rollouts_can_be_cancelled_and_the_server_goes_on(
    client: tinker.TrainingClient, sampler: tinker.SamplingClient
) -> None:
    async def cut_short() -> None:
        groups = [rl.Group(lambda: Album(6), 16, seed) for seed in range(8)]
        async with asyncio.timeout(1.0):
            await rl.rollout(groups, sampler, rl.Chat.of(client), tinker.SamplingParams(max_tokens=200))

    with pytest.raises(TimeoutError):
        asyncio.run(cut_short())
    answer = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, tinker.SamplingParams(max_tokens=2)).result(60)
    assert len(answer.sequences[0].tokens) > 0
