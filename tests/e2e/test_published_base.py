"""A server of a published checkpoint in fewer bits, over the official SDK: trainer and sampler agree, with images,
before and after training."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_local.backend import BackendOptions, InProcessBackend, ModelSource
from tinker_local.backend.tiny_models import make_tiny_text_model
from tinker_local.types import UnsupportedError

from tests.conftest import Server, start_server
from tests.e2e.test_agreement import agree_in_fewer_bits
from tests.published_checkpoints import Method, fp8, gptq, publish

METHODS: dict[str, Callable[[], Method]] = {"gptq": lambda: gptq(4, 32), "fp8": lambda: fp8((128, 128))}
CASES = {
    "gptq": ("gptq", ()),
    "fp8": ("fp8", ()),
    "gptq with its head": ("gptq", ("--head-precision", "int8")),
}


@pytest.fixture(scope="module", params=CASES)
def published_server(request: Any, tiny_models: dict[str, Path], tmp_path_factory: Any) -> Iterator[Server]:
    name = "tiny/vision"
    folder = tmp_path_factory.mktemp("published")
    method, options = CASES[request.param]
    packed, _ = publish(tiny_models[name], folder, METHODS[method]())
    server = start_server(folder / "data", "--model", f"{name}={packed}", *options)
    yield server
    server.stop()


@pytest.mark.more
def test_trainer_and_sampler_agree_on_a_published_base(published_server: Any, real_sdk: Any, picture: Any) -> None:
    """And not with the base that it was made of: fewer bits move logprobs further than rounding."""
    agree_in_fewer_bits(published_server.url, real_sdk, picture)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"base_precision": "int4"}, r"^--base-precision int4: the base is quantized already \(GPTQ in 4 bits, groups"),
        ({"shared_weights": "off"}, r"^a quantized base \(GPTQ in 4 bits, groups of 32\): trainer and sampler have to"),
    ],
)
def test_options_that_contradict_a_published_base_are_refused(
    options: Any, why: str, start_in_process: Any, tmp_path: Path
) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model"), tmp_path, gptq(4, 32))
    chosen = BackendOptions(data_dir=tmp_path / "data", **options)
    with pytest.raises((ValueError, UnsupportedError), match=why):
        start_in_process(InProcessBackend([ModelSource("m", folder)], chosen))


def test_a_published_mixture_of_experts_is_refused(start_in_process: Any, tmp_path: Path) -> None:
    folder, _ = publish(make_tiny_text_model(tmp_path / "model", family="qwen3_moe"), tmp_path, gptq(4, 32))
    with pytest.raises((ValueError, UnsupportedError), match=r"mixtures of experts cannot be served with quantized"):
        start_in_process(InProcessBackend([ModelSource("m", folder)], BackendOptions(data_dir=tmp_path / "data")))
