"""OpenAI's own client against this server: chat, completions, streams, images, logprobs, and what is refused."""

import base64
import hashlib
import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import tinker
from PIL import Image
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.fakes import FakeModel, FakeRenderer, FakeText, FakeTrainer
from tinker_local.backend.hosting.server import LoopbackServer
from tinker_local.backend.models.served_models import Engines

from tests.http.conftest import WatchedSampler, completions_of

MODEL = "fake/bigram"
HI: Any = [{"role": "user", "content": "hi"}]


class HeldSampler(WatchedSampler):
    """`hold_drawn` as `hold`, after each token that is streamed."""

    hold_drawn = threading.Event()
    hold_drawn.set()

    def _sample(self, work: Any, weights: Any, cancelled: threading.Event, clock: Any) -> Any:
        def drawn(tokens: Any) -> None:
            work.drawn(tokens)
            while not self.hold_drawn.wait(0.01) and not cancelled.is_set():
                pass

        return super()._sample(work if work.drawn is None else replace(work, drawn=drawn), weights, cancelled, clock)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> InProcessBackend:
    def load(source: ModelSource, options: BackendOptions) -> Engines:
        model = FakeModel(source.name)
        return Engines(
            FakeRenderer(model), FakeTrainer(model), HeldSampler(model), "fake", tolerance=1e-4, text=FakeText(model)
        )

    return InProcessBackend(
        [ModelSource(MODEL, MODEL)], BackendOptions(data_dir=tmp_path_factory.mktemp("data")), load=load
    )


@pytest.fixture(scope="module")
def server(backend: InProcessBackend) -> Iterator[LoopbackServer]:
    served = backend.serve_in_thread()
    yield served
    served.close()


@pytest.fixture(scope="module")
def client(server: LoopbackServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=server.api_key, max_retries=0) as one:
        yield one


def png(colour: str = "red", side: int = 32) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def sampled(server: LoopbackServer, prompt: str, path: str | None = None, **params: Any) -> Any:
    """What the SDK samples."""
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as service:
        named = {"base_model": MODEL} if path is None else {"model_path": path}
        client = service.create_sampling_client(**named)
        tokens = tinker.ModelInput.from_ints([ord(character) for character in prompt])
        return client.sample(tokens, 1, tinker.SamplingParams(**params)).result().sequences[0]


def test_chat_is_what_the_sdk_samples_with_equal_logprobs_on_fakes(
    client: openai.OpenAI, server: LoopbackServer
) -> None:
    said = client.chat.completions.create(
        model=MODEL, messages=HI, seed=7, temperature=0.7, max_tokens=12, logprobs=True, top_logprobs=3
    )
    same = sampled(server, "user:hi\nassistant:", seed=7, temperature=0.7, max_tokens=12)
    (choice,) = said.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == [chr(token) for token in same.tokens]
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(list(same.logprobs), abs=1e-6)
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob
        assert bytes(entry.bytes or []).decode() == entry.token
    assert choice.message.content == "".join(chr(token) for token in same.tokens if token)
    assert choice.finish_reason == same.stop_reason
    assert said.usage is not None
    assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (len("user:hi\nassistant:"), len(same.tokens))


@pytest.mark.mutation(
    "stream-without-its-last-tokens",
    "Answer.drawings",
    "            ended = all(operation.done for operation in self.operations)\n",
    "            ended = True\n",
)
def test_stream_has_the_same_text_logprobs_and_usage_as_the_whole_answer_on_fakes(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": HI,
        "seed": 3,
        "max_tokens": 40,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    reasons: dict[int, str] = {}
    roles: dict[int, Any] = {}
    *chunks, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        (choice,) = chunk.choices
        index = choice.index
        assert chunk.usage is None
        roles.setdefault(index, choice.delta.role)
        texts[index] = texts.get(index, "") + (choice.delta.content or "")
        if choice.logprobs is not None:
            logprobs[index] = logprobs.get(index, []) + (choice.logprobs.content or [])
        if choice.finish_reason:
            assert index not in reasons
            reasons[index] = choice.finish_reason
    assert last.choices == []
    assert last.usage == whole.usage
    for choice in whole.choices:
        assert roles[choice.index] == "assistant"
        assert texts[choice.index] == choice.message.content
        assert reasons[choice.index] == choice.finish_reason
        assert choice.logprobs is not None
        assert logprobs[choice.index] == choice.logprobs.content
    assert len({choice.message.content for choice in whole.choices}) == 3


def test_completions_of_several_prompts_on_fakes(client: openai.OpenAI, server: LoopbackServer) -> None:
    prompts: Any = ["ab", "cd"]
    asked: Any = {"model": MODEL, "seed": 5, "max_tokens": 6, "n": 2, "logprobs": 2}
    found = client.completions.create(prompt=prompts, **asked)
    same = sampled(server, "cd", seed=5, max_tokens=6)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    third = found.choices[2].logprobs
    assert third is not None
    assert third.tokens == [chr(token) for token in same.tokens]
    assert third.token_logprobs == pytest.approx(list(same.logprobs), abs=1e-6)
    assert third.top_logprobs is not None
    assert all(2 <= len(top) <= 3 for top in third.top_logprobs)
    streamed = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(prompt=prompts, **asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {choice.index: choice.text for choice in found.choices}
    tokens = client.completions.create(model=MODEL, prompt=[ord("c"), ord("d")], seed=5, max_tokens=6)
    assert tokens.choices[0].text == found.choices[2].text
    short = client.completions.create(model=MODEL, prompt="ab", temperature=0, extra_body={"top_k": 1})
    assert short.usage is not None
    assert short.usage.completion_tokens <= 16


IDS: Any = {"return_token_ids": True}


def test_token_ids_are_in_whole_answers_and_in_streams_on_fakes(client: openai.OpenAI) -> None:
    """Of every token, also of those that show no text: EOS, and what may become a stop."""
    settings: Any = {"model": MODEL, "seed": 6, "n": 2, "stop": ["qqqq", "zz"], "extra_body": IDS}
    prompt = [ord(letter) for letter in "user:hi\nassistant:"]
    chat = client.chat.completions.create(messages=HI, **settings).model_dump()
    assert chat["prompt_token_ids"] == prompt
    assert "prompt_images" not in chat
    texts: Any = {"prompt": ["ab", [99, 100]], **settings, "max_tokens": 40}
    completions = client.completions.create(**texts).model_dump()
    for choices in (chat["choices"], completions["choices"]):
        assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    read = [choice["prompt_token_ids"] for choice in completions["choices"]]
    assert read == [[97, 98], [97, 98], [99, 100], [99, 100]]
    assert "prompt_token_ids" not in completions
    for whole, chunks in (
        (chat, client.chat.completions.create(messages=HI, **settings, stream=True)),
        (completions, client.completions.create(**texts, stream=True)),
    ):
        tokens: dict[int, list[int]] = {}
        prompts: dict[Any, list[int]] = {}
        for chunk in (one.model_dump() for one in chunks):
            (choice,) = chunk["choices"]
            tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            for at, given in ((None, chunk), (choice["index"], choice)):
                if "prompt_token_ids" in given:
                    assert at not in prompts
                    prompts[at] = given["prompt_token_ids"]
        assert tokens == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
        assert prompts == ({None: prompt} if whole is chat else dict(enumerate(read)))
    plain = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=2).model_dump()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_images_among_token_ids_have_their_hash_and_place_on_fakes(client: openai.OpenAI) -> None:
    image = base64.b64decode(png())
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}}
    content: Any = [{"type": "text", "text": "ab"}, picture, {"type": "text", "text": "c"}]
    messages: Any = [{"role": "user", "content": content}]
    said = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, extra_body=IDS).model_dump()
    (placed,) = said["prompt_images"]
    assert placed["sha256"] == hashlib.sha256(image).hexdigest()
    ids, end = said["prompt_token_ids"], placed["offset"] + placed["length"]
    assert "".join(map(chr, ids[: placed["offset"]])) == "user:ab"
    assert "".join(map(chr, ids[end:])) == "c\nassistant:"
    assert len({*ids[placed["offset"] : end]}) == 1


def test_tokens_of_logprobs_are_ids_if_asked_on_fakes(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "seed": 6, "max_tokens": 5, "extra_body": {**IDS, "return_tokens_as_token_ids": True}}
    chat = client.chat.completions.create(messages=HI, logprobs=True, top_logprobs=2, **asked).model_dump()
    (choice,) = chat["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    for entry in content:
        ids = [int(other["token"].removeprefix("token_id:")) for other in entry["top_logprobs"]]
        assert [[*chr(one).encode()] for one in ids] == [other["bytes"] for other in entry["top_logprobs"]]
    texts = client.completions.create(prompt="ab", logprobs=2, **asked).model_dump()["choices"][0]
    assert texts["logprobs"]["tokens"] == [f"token_id:{token}" for token in texts["token_ids"]]
    assert all(name in top for name, top in zip(*map(texts["logprobs"].get, ("tokens", "top_logprobs")), strict=True))


def test_echo_begins_with_the_prompt_on_fakes(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["abc", [100, 101]], "echo": True, "seed": 2, "max_tokens": 4}
    plain = client.completions.create(**{**asked, "echo": False}, logprobs=1)
    echoed = client.completions.create(**asked, logprobs=True)
    assert [choice.text for choice in echoed.choices] == [
        said + choice.text for said, choice in zip(("abc", "de"), plain.choices, strict=True)
    ]
    for said, choice, without in zip(("abc", "de"), echoed.choices, plain.choices, strict=True):
        found, rest = choice.logprobs, without.logprobs
        assert found is not None
        assert rest is not None
        assert found.tokens == [*said, *(rest.tokens or [])]
        assert found.token_logprobs is not None
        assert found.token_logprobs[0] is None
        assert found.token_logprobs[len(said) :] == rest.token_logprobs
        assert found.top_logprobs is not None
        assert found.top_logprobs[0] is None
        assert found.text_offset == [*range(len(said)), *(len(said) + at for at in rest.text_offset or [])]
    streamed = dict.fromkeys(range(2), "")
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [*streamed.values()] == [choice.text for choice in echoed.choices]
    nothing = client.completions.create(**{**asked, "max_tokens": 0})
    assert [choice.text for choice in nothing.choices] == ["abc", "de"]
    assert nothing.usage is not None
    assert (nothing.usage.prompt_tokens, nothing.usage.completion_tokens) == (5, 0)
    assert client.completions.create(**{**asked, "logprobs": False}).choices[0].logprobs is None


def test_prompts_are_tokenized_as_they_are_read_on_fakes(client: openai.OpenAI, server: LoopbackServer) -> None:
    """As programs ask vLLM's server, beside `/v1`."""

    def ask(path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {server.api_key}"}
        return httpx.post(f"{server.url}/{path}", json={"model": MODEL, **body}, headers=headers)

    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}}
    content = [{"type": "text", "text": "ab"}, picture]
    for fields in (
        {"messages": HI},
        {"messages": [{"role": "user", "content": content}]},
        {"messages": HI, "chat_template_kwargs": {"end": "!"}},
    ):
        said: Any = client.chat.completions.create(model=MODEL, max_tokens=1, extra_body={**fields, **IDS}, messages=[])
        found = ask("tokenize", **fields).json()
        assert found["tokens"] == said.prompt_token_ids
        assert found.get("prompt_images") == getattr(said, "prompt_images", None)
        assert found["count"] == len(found["tokens"])
        assert found["max_model_len"] >= 1024
        assert found["token_strs"] is None
    text = ask("tokenize", prompt="héj", add_special_tokens=True, return_token_strs=True).json()
    assert (text["tokens"], text["token_strs"]) == ([104, 233, 106], ["h", "é", "j"])
    assert ask("detokenize", tokens=text["tokens"]).json() == {"prompt": "héj"}
    for path, fields, param in (
        ("tokenize", {}, "messages"),
        ("tokenize", {"prompt": "a", "messages": HI}, "messages"),
        ("tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("tokenize", {"messages": HI, "add_generation_prompt": False}, "add_generation_prompt"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("detokenize", {"tokens": "a"}, "tokens"),
    ):
        refused = ask(path, **fields)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param, refused.text
    assert httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": "a"}).status_code == 401


def test_vllms_parameters_that_change_nothing_are_taken_on_fakes(client: openai.OpenAI) -> None:
    """As prime-rl, verifiers and other programs send them to vLLM's server."""
    nothing = {
        "top_k": -1, "min_p": 0.0, "min_tokens": 0, "repetition_penalty": 1.0, "ignore_eos": False, "logit_bias": {},
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False,
        "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [],
    }  # fmt: skip
    of_chat = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}
    greedy: Any = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    plain = client.chat.completions.create(messages=HI, **greedy)
    same = client.chat.completions.create(messages=HI, **greedy, extra_body={**nothing, **of_chat, "echo": False})
    assert same.choices == plain.choices
    client.completions.create(prompt="a", **greedy, extra_body=nothing)


def test_token_ids_end_an_answer_on_fakes(client: openai.OpenAI) -> None:
    """As in vLLM's server, it is among the ids and not in the text."""
    asked: Any = {"model": MODEL, "prompt": "ab", "seed": 4, "max_tokens": 40}
    free: Any = client.completions.create(**asked, extra_body=IDS).choices[0]
    stop = free.token_ids[1]
    end = free.token_ids.index(stop)
    asked["extra_body"] = {**IDS, "stop_token_ids": [stop]}
    stopped: Any = client.completions.create(**asked).choices[0]
    assert stopped.token_ids == free.token_ids[: end + 1]
    assert (stopped.text, stopped.finish_reason) == ("".join(map(chr, free.token_ids[:end])), "stop")
    chunks = client.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens", "only for echo=true"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens", "stream=false"),
        ({"echo": True, "prompt": ["a" * 8000] * 8, "n": 20}, "n", "1280000 tokens"),
        ({"extra_body": IDS, "prompt": ["a" * 8000] * 8, "n": 20, "stream": True}, "n", "1280000 tokens"),
        ({"echo": True, "stream": True, "logprobs": 1}, "echo", "stream=false"),
        ({"echo": True, "prompt": ["a" * 1000] * 60, "n": 5, "logprobs": 20}, "logprobs", "300000 of prompts"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop": ["x"], "extra_body": {"stop_token_ids": [5]}}, "stop_token_ids", "not together"),
        ({"extra_body": {"min_tokens": 2}}, "min_tokens", "not supported"),
        ({"presence_penalty": 3}, "presence_penalty", "2"),
    ],
)
def test_what_completions_refuse_is_named_on_fakes(
    client: openai.OpenAI, fields: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as refused:
        client.completions.create(**{"model": MODEL, "prompt": "ab", "max_tokens": 4, **fields})
    assert refused.value.param == param, refused.value.message


def test_penalties_reach_the_sampler_on_fakes(client: openai.OpenAI) -> None:
    """The numbers are tested in vLLM (`tests/sampling/test_penalties.py`)."""
    asked: Any = {"model": MODEL, "prompt": "ab", "max_tokens": 30, "seed": 1, "n": 16}
    given: list[Any] = [{}, {"frequency_penalty": -2}, {"presence_penalty": -2}, {"presence_penalty": -2.0}]
    found = [client.completions.create(**asked, **penalty).choices for penalty in given]
    said = [tuple(choice.text for choice in choices) for choices in found]
    assert said[2] == said[3]
    assert len({*said}) == 3


def test_images_are_read_on_fakes(client: openai.OpenAI) -> None:
    def ask(colour: str) -> Any:
        url = f"data:image/png;base64,{png(colour)}"
        picture = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        content: Any = [picture, {"type": "text", "text": "what?"}]
        return client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], seed=1, max_tokens=8
        )

    red, blue = ask("red"), ask("blue")
    assert red.usage.prompt_tokens == len("user:what?\nassistant:") + 1
    assert red.choices[0].message.content != blue.choices[0].message.content


def picture_files(images: Sequence[Image.Image]) -> dict[str, bytes]:
    """The first of `images` in all formats without loss of its colours; WebP and GIF have the others behind it."""
    files = {}
    formats: dict[str, dict[str, Any]] = {
        "png": {},
        "jpeg": {"quality": 100},
        "webp": {"lossless": True, "save_all": True},
        "gif": {"save_all": True},
    }
    for name, settings in formats.items():
        buffer = io.BytesIO()
        images[0].save(buffer, name, **settings, **({"append_images": images[1:]} if "save_all" in settings else {}))
        files[name] = buffer.getvalue()
    return files


def test_images_are_read_as_what_their_bytes_are_on_fakes(client: openai.OpenAI) -> None:
    """Whatever the media type says."""

    def ask(data: bytes, media_type: str) -> Any:
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        content: Any = [{"type": "image_url", "image_url": {"url": url}}]
        messages: Any = [{"role": "user", "content": content}]
        said = client.chat.completions.create(model=MODEL, messages=messages, seed=1, max_tokens=8)
        return said.choices[0].message.content

    grey, black = Image.new("RGB", (64, 32), (128, 128, 128)), Image.new("RGB", (64, 32))
    files, others = picture_files([grey, black]), picture_files([black, grey])
    types = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif", "application/octet-stream", "")
    for name, data in files.items():
        said = ask(data, f"image/{name}")
        assert {ask(data, media_type) for media_type in types} == {said}
        assert ask(others[name], f"image/{name}") != said


def test_stop_texts_are_cut_off_wherever_tokens_end_on_fakes(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HI, "seed": 4, "max_tokens": 30}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    assert len(text) > 6
    for stop in (text[3:6], [text[4], "never"]):
        first = min(text.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text)
        whole = client.chat.completions.create(**asked, stop=stop).choices[0]
        assert (whole.message.content, whole.finish_reason) == (text[:first], "stop")
        pieces = [
            c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stop=stop, stream=True)
        ]
        assert "".join(pieces) == text[:first]


def test_checkpoints_answer_under_their_paths_and_are_listed_on_fakes(
    client: openai.OpenAI, server: LoopbackServer
) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as service:
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        target: Any = {"target_tokens": [65]}
        data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([58]), loss_fn_inputs=target)]
        for _ in range(3):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(tinker.AdamParams(learning_rate=0.5)).result()
        path = training.save_weights_for_sampler("one").result().path
        state = training.save_state("two").result().path
    for name in (path, f"{MODEL};{path}"):
        said = client.chat.completions.create(model=name, messages=HI, temperature=0, max_tokens=1)
        assert said.model == name
        assert said.choices[0].message.content == "A"
    listed = {model.id for model in client.models.list()}
    assert {MODEL, path} <= listed
    assert state not in listed
    for name in (MODEL, path, f"{MODEL};{path}"):
        assert client.models.retrieve(name).id == name
    assert client.models.retrieve(path).created > client.models.retrieve(MODEL).created
    for name in (state, f"other/base;{path}", "tinker://unknown/sampler_weights/x"):
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(model=name, messages=HI)
        assert refused.value.status_code in (400, 404)
        assert refused.value.param == "model", refused.value.message
        with pytest.raises(openai.APIStatusError) as refused:
            client.models.retrieve(name)
        assert refused.value.param == "model", refused.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "high"}, "verbosity"),
        ({"store": True}, "store"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 100000}, "n"),
        ({"n": 1024, "logprobs": True, "top_logprobs": 20}, "logprobs"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x" * 300000}]}, "messages"),
        ({"extra_body": {"chat_template_kwargs": {"never": 1}}}, "chat_template_kwargs"),
    ],
)
def test_what_is_not_served_is_refused_by_name_on_fakes(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": HI, **fields})
    assert refused.value.param == param, refused.value.message
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,!!!", "not base64"),
        ("data:image/png;base64,aGVsbG8=", "no PNG, JPEG, WebP or GIF file"),
        ("data:image/png,abc", "base64"),
        (f"data:image/png;base64,{png()[:60]}", "cannot be decoded"),
        ("http://127.0.0.1/secret.png", "reads no images by name"),
        ("file:///etc/passwd.png", "reads no images by name"),
        ("https://example.com/picture", "reads no images by name"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_images_are_refused_before_a_stream_begins_on_fakes(
    client: openai.OpenAI, url: str, reason: str, stream: bool
) -> None:
    content: Any = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError, match=reason):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], stream=stream)


def test_harmless_parameters_of_clients_are_taken_on_fakes(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be", "name": "operator"},
            {"role": "assistant", "content": "a", "refusal": None, "name": "agent"},
            {"role": "user", "content": "hi", "name": "someone"},
        ],
        frequency_penalty=0,
        presence_penalty=0,
        verbosity="medium",
        reasoning_effort="none",
        store=False,
        extra_body={"top_k": 0},
        user="me",
        tools=[],
        response_format={"type": "text"},
        parallel_tool_calls=True,
        stop=[],
        max_tokens=2,
    )
    assert said.usage is not None
    assert said.usage.prompt_tokens == len("system:be\nassistant:a\nuser:hi\nassistant:")


def test_messages_that_openais_client_has_parsed_can_be_sent_back_on_fakes(client: openai.OpenAI) -> None:
    parsed: Any = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "parsed": {"day": 1}}
    said = client.chat.completions.create(model=MODEL, messages=[*HI, parsed, *HI], max_tokens=1)
    plain = client.chat.completions.create(
        model=MODEL, messages=[*HI, {"role": "assistant", "content": "a"}, *HI], max_tokens=1
    )
    assert said.usage == plain.usage
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    calls: Any = {"role": "assistant", "content": None, "parsed": None}
    calls["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    result: Any = {"role": "tool", "tool_call_id": "c", "content": "b"}
    client.chat.completions.create(model=MODEL, messages=[*HI, calls, result], max_tokens=1)


def test_errors_have_openais_shape_on_fakes(client: openai.OpenAI, server: LoopbackServer) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no/model", messages=HI)
    assert unknown.value.param == "model"
    assert MODEL in unknown.value.message
    wrong = client.with_options(api_key="tml-wrong-key-0000")
    with pytest.raises(openai.AuthenticationError) as refused:
        wrong.models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError, match="there is no POST"):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        client.responses.create(model=MODEL, input="x")
    long: Any = [{"role": "user", "content": "z" * 10000}]
    longest: Any = [{"role": "user", "content": "z" * 10**7}]
    for messages, most in ((HI, 100000), (long, 4), (longest, 4)):
        for stream in (False, True):
            with pytest.raises(
                openai.BadRequestError, match="This model's maximum context length is 4096 tokens"
            ) as over:
                list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=most, stream=stream))
            assert over.value.code == "context_length_exceeded"
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {server.api_key}"}) as http:
        broken = http.post(f"{client.base_url}chat/completions", content=b"{")
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "invalid_request_error"


def samples_kept(backend: InProcessBackend, server: LoopbackServer) -> int:
    """Samples of endpoints in flight, and results that a client could still read."""
    (own,) = completions_of(server)._owners.values()
    return sum(request_id.startswith(f"{own.session_id}:") for request_id in list(backend.operations._by_id))


def test_tokens_come_as_they_are_drawn_and_a_client_that_leaves_frees_its_place_on_fakes(
    client: openai.OpenAI, backend: InProcessBackend, server: LoopbackServer, eventually: Callable[..., None]
) -> None:
    (model,) = backend.models.distinct()
    before = model.counts.samples
    asked: Any = {"model": MODEL, "messages": HI, "seed": 4, "n": 8}
    HeldSampler.hold_drawn.clear()
    try:
        stream = client.chat.completions.create(**asked, stream=True)
        next(iter(stream))
        assert model.sample_turns.sequences == 8
        stream.close()
        eventually(lambda: model.sample_turns.sequences == 0 and not samples_kept(backend, server))
    finally:
        HeldSampler.hold_drawn.set()
    assert model.counts.samples == before


def test_a_client_that_gives_up_frees_its_place_on_fakes(
    client: openai.OpenAI, backend: InProcessBackend, server: LoopbackServer, eventually: Callable[..., None]
) -> None:
    (model,) = backend.models.distinct()
    held: Any = model.engines.sampler._sampler  # type: ignore[attr-defined]
    held.hold.clear()
    try:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(model=MODEL, messages=HI, timeout=0.5)
        eventually(lambda: model.sample_turns.sequences == 0 and not samples_kept(backend, server))
    finally:
        held.hold.set()


def test_results_of_endpoints_are_not_kept_on_fakes(
    client: openai.OpenAI, backend: InProcessBackend, server: LoopbackServer, eventually: Callable[..., None]
) -> None:
    client.chat.completions.create(model=MODEL, messages=HI, max_tokens=2)
    list(client.chat.completions.create(model=MODEL, messages=HI, max_tokens=2, stream=True))
    eventually(lambda: not samples_kept(backend, server))


def test_v1_is_the_same_api_on_fakes(client: openai.OpenAI, server: LoopbackServer) -> None:
    there = client.with_options(base_url=f"{server.url}/v1")
    assert there.models.list().data[0].id == MODEL
    asked: Any = {"model": MODEL, "messages": HI, "seed": 1}
    same = [one.chat.completions.create(**asked).choices for one in (client, there)]
    assert same[0] == same[1]
    assert there.completions.create(model=MODEL, prompt="a").choices


def test_stream_is_server_sent_events_that_end_with_done_on_fakes(
    client: openai.OpenAI, server: LoopbackServer
) -> None:
    body = {"model": MODEL, "messages": HI, "max_tokens": 3, "stream": True}
    with httpx.Client(trust_env=False, headers={"Authorization": f"Bearer {server.api_key}"}) as http:
        answer = http.post(f"{client.base_url}chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(each.removeprefix("data: "))["object"] == "chat.completion.chunk" for each in events)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], bool], seconds: float = 60) -> None:
        pause = threading.Event()
        for _ in range(int(seconds / 0.01)):
            if condition():
                return
            pause.wait(0.01)
        pytest.fail("it never came true")

    return wait
