"""Token ids at the endpoints, on vLLM and Hugging Face: they are what the model read, so that one can train on them."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import tinker
from transformers import AutoTokenizer

from tests.conftest import TEXT, VISION, Server
from tests.documentation.pages import DOCS, blocks

IDS: Any = {"return_token_ids": True}
SETTINGS: Any = {"seed": 5, "max_tokens": 10}


@pytest.fixture
def pictures(picture: Callable[..., tuple[Any, int]]) -> list[bytes]:
    return [bytes(picture(*size)[0].data) for size in ((64, 48), (96, 96))]


def url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def asked(pictures: list[bytes]) -> list[Any]:
    """Two turns, with text between two pictures."""
    first, second = ({"type": "image_url", "image_url": {"url": url(image)}} for image in pictures)
    return [
        {"role": "user", "content": [{"type": "text", "text": "Compare"}, first, {"type": "text", "text": "with"}]},
        {"role": "assistant", "content": "What?"},
        {"role": "user", "content": [second, {"type": "text", "text": "this."}]},
    ]


@pytest.fixture
def datum() -> Callable[..., tinker.Datum]:
    """The function that `docs/endpoints.md` shows."""
    (block,) = [block for block in blocks(DOCS / "endpoints.md") if "def datum" in block.text]
    named: Any = {}
    exec(compile(block.text, block.page, "exec"), named)
    return named["datum"]  # type: ignore[no-any-return]


def test_training_on_the_ids_of_a_chat_with_pictures_gives_the_logprobs_of_the_chat(
    client: openai.OpenAI, service: tinker.ServiceClient, pictures: list[bytes], datum: Callable[..., tinker.Datum]
) -> None:
    training = service.create_lora_training_client(VISION, rank=4, seed=3)
    target: Any = {"target_tokens": [5, 6, 7]}
    training.forward_backward(
        [tinker.Datum(model_input=tinker.ModelInput.from_ints([4, 5, 6]), loss_fn_inputs=target)], "cross_entropy"
    )
    training.optim_step(tinker.AdamParams(learning_rate=0.05)).result()
    path = training.save_weights_for_sampler("for-ids").result().path
    given: list[tuple[Any, list[bytes]]] = [(asked(pictures), pictures), ([{"role": "user", "content": "a"}], [])]
    for messages, files in given:
        answer: Any = client.chat.completions.create(
            model=path, messages=messages, n=2, logprobs=True, extra_body=IDS, **SETTINGS
        )
        assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens
        data = [datum(answer, choice, files, 1.0) for choice in answer.choices]
        outputs = training.forward(data, "importance_sampling").result().loss_fn_outputs
        for output, choice in zip(outputs, answer.choices, strict=True):
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            assert len(choice.token_ids) == len(logprobs)
            assert output["logprobs"].to_numpy()[-len(logprobs) :] == pytest.approx(logprobs, abs=2e-4)


def test_streams_and_anthropics_messages_have_the_same_ids(
    client: openai.OpenAI, real_server: Server, pictures: list[bytes]
) -> None:
    greedy: Any = {"model": VISION, "messages": asked(pictures), "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**greedy, logprobs=True, extra_body=IDS).model_dump()
    logprobs = [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]]
    prompts: list[Any] = []
    tokens: list[int] = []
    for chunk in client.chat.completions.create(**greedy, stream=True, extra_body=IDS):
        given = chunk.model_dump()
        prompts += [given] if "prompt_token_ids" in given else []
        tokens += given["choices"][0].get("token_ids") or []
    (first,) = prompts
    for name in ("prompt_token_ids", "prompt_images"):
        assert first[name] == whole[name]
    assert tokens == whole["choices"][0]["token_ids"]
    with anthropic.Anthropic(base_url=real_server.url, api_key="tml-any", max_retries=0) as other:

        def part(given: Any) -> Any:
            if given["type"] == "text":
                return given
            data = given["image_url"]["url"].partition(",")[2]
            return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

        turns: Any = [
            {**turn, "content": [part(each) for each in turn["content"]]} if turn["role"] == "user" else turn
            for turn in greedy["messages"]
        ]
        body: Any = {"model": VISION, "max_tokens": 12, "messages": turns, "extra_body": {"temperature": 0, **IDS}}
        message = other.messages.create(**body).model_dump()
        for name in ("prompt_token_ids", "prompt_images"):
            assert message[name] == whole[name]
        assert message["token_ids"] == tokens
        assert message["logprobs"] == pytest.approx(logprobs, abs=1e-4)
        events = [event.model_dump() for event in other.messages.create(**body, stream=True)]
        (start,) = [event["message"] for event in events if event["type"] == "message_start"]
        (end,) = [event for event in events if event["type"] == "message_delta"]
        assert start["prompt_token_ids"] == whole["prompt_token_ids"]
        assert start["prompt_images"] == whole["prompt_images"]
        assert end["token_ids"] == tokens
        assert end["logprobs"] == pytest.approx(logprobs, abs=1e-4)


def test_a_prompt_of_ids_goes_on_where_a_chat_ended(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Grüße, 你好"}]
    said = client.chat.completions.create(model=TEXT, messages=messages, extra_body=IDS, **SETTINGS).model_dump()
    (choice,) = said["choices"]
    again = client.completions.create(
        model=TEXT, prompt=said["prompt_token_ids"], logprobs=0, extra_body=IDS, **SETTINGS
    ).model_dump()
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    assert again["choices"][0]["prompt_token_ids"] == said["prompt_token_ids"]
    more = said["prompt_token_ids"] + choice["token_ids"]
    turn = client.completions.create(model=TEXT, prompt=more, max_tokens=1, extra_body=IDS).model_dump()
    assert turn["choices"][0]["prompt_token_ids"] == more
    assert turn["usage"]["prompt_tokens"] == len(more)


def test_echo_scores_a_prompt_as_the_sdk_does(
    client: openai.OpenAI, service: tinker.ServiceClient, tiny_models: dict[str, Path]
) -> None:
    """As lm-eval's local-completions asks: with ids, one token, and the likeliest beside each."""
    sampler = service.create_sampling_client(base_model=TEXT)
    texts = ["The sky is blue, 你好 😀.", "A short one"]
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_models[TEXT])
    prompts = [tokenizer.encode(text) for text in texts]
    one = tinker.SamplingParams(max_tokens=1)
    expected: list[Any] = [
        sampler.sample(
            tinker.ModelInput.from_ints(prompt), 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=2
        ).result()
        for prompt in prompts
    ]
    both: Any = {"model": TEXT, "echo": True, "temperature": 0, "logprobs": 2}
    for given in (prompts, texts):
        said = client.completions.create(prompt=given, max_tokens=1, **both)
        bare = client.completions.create(prompt=given, max_tokens=0, **both)
        assert bare.usage is not None
        assert bare.usage.completion_tokens == 0
        for choice, without, text, prompt, same in zip(
            said.choices, bare.choices, texts, prompts, expected, strict=True
        ):
            found = choice.logprobs
            assert found is not None
            assert found.token_logprobs is not None
            assert found.token_logprobs[0] is None
            assert found.token_logprobs[1 : len(prompt)] == pytest.approx(same.prompt_logprobs[1:], abs=1e-5)
            assert len(found.token_logprobs) == len(prompt) + 1
            assert choice.text.startswith(text)
            assert (without.text, without.finish_reason) == (text, "length")
            assert without.logprobs is not None
            assert without.logprobs.token_logprobs == found.token_logprobs[:-1]
            top = found.top_logprobs
            assert top is not None
            for row, likeliest in zip(top[1 : len(prompt)], same.topk_prompt_logprobs[1:], strict=True):
                values = [value for _, value in likeliest]
                assert sorted(row.values(), reverse=True)[:2] == pytest.approx(values, abs=1e-5)
            tokens = found.tokens or []
            assert [row[token] for token, row in zip(tokens[1:], top[1:], strict=True)] == found.token_logprobs[1:]
