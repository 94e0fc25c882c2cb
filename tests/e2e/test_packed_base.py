"""A server whose base is in 8 or 4 bits, over the official SDK: trainer and sampler agree, with images, before and
after training."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.backend.tiny_models.seeing_models import make_tiny_seeing_model
from tinker_local.backend.tiny_models.shapes import TextShape
from tinker_local.types import LoraConfig, UnsupportedError

from tests.conftest import Server, start_server
from tests.e2e.conftest import SdkDriver
from tests.e2e.test_agreement import (
    TOLERANCE,
    agree_in_fewer_bits,
    difference,
    inputs_of,
    sampler_logprobs,
    train,
    trainer_logprobs,
)
from tests.families.test_other_families import tiny

BASES = {
    "int8": ("--base-precision", "int8"),
    "int4": ("--base-precision", "int4"),
    "int4 with its head": ("--base-precision", "int4", "--head-precision", "int8"),
    "dense with its head": ("--head-precision", "int8"),
}


@pytest.fixture(scope="module", params=BASES)
def packed_server(request: Any, tiny_models: dict[str, Path], tmp_path_factory: Any) -> Iterator[Server]:
    name = "tiny/vision"
    folder = tmp_path_factory.mktemp("packed")
    server = start_server(folder, "--model", f"{name}={tiny_models[name]}", *BASES[request.param])
    yield server
    server.stop()


@pytest.mark.more
def test_trainer_and_sampler_agree_in_fewer_bits(packed_server: Any, real_sdk: Any, picture: Any) -> None:
    """And not with the base in float32: to be in fewer bits moves logprobs further than rounding."""
    agree_in_fewer_bits(packed_server.url, real_sdk, picture)


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *(("qwen3_moe", "int8"), ("qwen3_moe", "int4"), ("mixtral", "int8"), ("glm4_moe", "int4")),
        *(("minimax_m2", "int8"), ("lfm2_moe", "int8")),
    ],
)
def test_trainer_and_sampler_agree_with_experts_in_fewer_bits(
    family: Any, precision: str, serve: Callable[..., Server], tmp_path: Path
) -> None:
    """In two processes, which read one copy."""
    shape = TextShape(intermediate_size=256)
    if family == "lfm2_moe":
        shape = replace(shape, hidden_size=128, num_layers=3)
    path = make_tiny_text_model(tmp_path / "model", family=family, shape=shape)
    processes = ("--sampler", "process", "--trainer", "process")
    server = serve("--model", f"tiny/experts={path}", "--base-precision", precision, "--kv-cache", "0.25", *processes)
    (shared,) = [line for line in server.lines if "trainer and sampler share" in line]
    assert shared.endswith(f" of weights, the layers in {precision}")
    inputs, sdk = inputs_of("tiny/experts", None), SdkDriver(server.url)
    client = sdk.create("tiny/experts", LoraConfig(rank=8, seed=4))
    base = sampler_logprobs(sdk.base_sampler("tiny/experts"), inputs)
    assert difference(trainer_logprobs(client, inputs), base) <= TOLERANCE
    train(client, inputs, 3)
    trained = trainer_logprobs(client, inputs)
    assert difference(trained, sampler_logprobs(client.save_weights_and_get_sampling_client(), inputs)) <= TOLERANCE
    assert difference(trained, base) > 0.2


@pytest.mark.parametrize(
    ("family", "why"),
    [
        (
            "qwen3_moe",
            "rows of its experts have 64 and 48 numbers, and experts are packed where groups of 32 divide both$",
        ),
        ("persimmon", "nothing of a model of type persimmon is"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_it_is_loaded(
    family: Any, why: str, start_in_process: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    if family == "persimmon":
        tiny(family, path)
    else:
        make_tiny_text_model(path, family=family)
    options = BackendOptions(data_dir=tmp_path / "data", base_precision="int4")
    with pytest.raises(UnsupportedError, match=rf"/model: --base-precision int4: {why}"):
        start_in_process(InProcessBackend([ModelSource("m", str(path))], options))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("narrow", "rows of its embedding and LM head have 48 numbers, which cannot be divided into groups of 32"),
        (
            "gemma4",
            r"its layers read a second embedding \(hidden_size_per_layer_input\), which",
        ),
        ("gpt_oss", "vLLM has another form of the weights of gpt_oss models than the trainer"),
    ],
)
def test_a_head_that_cannot_be_packed_is_refused_before_it_is_loaded(
    model: Any, why: str, start_in_process: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    if model == "narrow":
        make_tiny_text_model(path, shape=TextShape(hidden_size=48))
    elif model == "gemma4":
        make_tiny_seeing_model(path, model)
    else:
        make_tiny_text_model(path, family=model)
    options = BackendOptions(data_dir=tmp_path / "data", head_precision="int8")
    with pytest.raises(UnsupportedError, match=rf"/model: --head-precision int8: {why}.*; serve it without the option"):
        start_in_process(InProcessBackend([ModelSource("m", str(path))], options))
