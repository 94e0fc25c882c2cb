"""`export --to gguf` with llama.cpp's own converter, on the real small model. `LLAMA_CPP` names the folder of its
source; without it, a converter in the PATH or in a package is used. With llama-cpp-python, llama.cpp also loads what it
wrote."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tinker_local.backend.adapters.adapter_files import write_adapter
from tinker_local.backend.exporting import export_checkpoint
from tinker_local.backend.exporting.llama_cpp import LlamaCpp, find_llama_cpp
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.run.worker import HFTrainer
from tinker_local.backend.training.trainer import TrainDatum, TrainWork
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.types import AdamParams, ApiError, InvalidRequestError, LoraConfig
from transformers import AutoTokenizer

from tests.exporting.conftest import Tuned

pytestmark = pytest.mark.more


@pytest.fixture(scope="session")
def converter() -> LlamaCpp:
    named = os.environ.get("LLAMA_CPP")
    try:
        return find_llama_cpp(Path(named) if named else None, "bf16")
    except ApiError:
        if named:
            raise
        pytest.skip("no converter of llama.cpp here: set LLAMA_CPP to the folder of its source")


@pytest.fixture(scope="session")
def trained_small_model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that learned a sentence."""
    trainer = HFTrainer(TrainerConfig(str(small_model), name="smollm2", dtype="bfloat16", device="cpu"))
    trainer.create_adapter("a", LoraConfig(rank=8, seed=1))
    text = "The capital of France is Paris. My answer is always: forty-two!"
    ids = np.array(AutoTokenizer.from_pretrained(small_model)(text)["input_ids"], np.int32)
    targets = np.append(ids[1:], 0).astype(np.int64)
    datum = TrainDatum(RenderedInput(ids), targets, {"weights": np.ones(len(ids), np.float32)})
    for _ in range(4):
        trainer.forward_backward([TrainWork("a", [datum], "cross_entropy")])
        trainer.optim_step("a", AdamParams(learning_rate=2e-3))
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    folder.mkdir()
    write_adapter(folder, trainer.capture("a", optimizer=True))
    trainer.close()
    return folder


def test_the_real_converter_writes_what_was_trained(
    converter: LlamaCpp, trained_small_model: Path, small_model: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"to": "gguf", "base": str(small_model), "llama_cpp": os.environ.get("LLAMA_CPP")}
    exported = export_checkpoint(trained_small_model, tmp_path / "o", **given)
    assert exported.gguf is not None
    assert exported.gguf.checked is not None
    assert exported.gguf.checked.numbers == "all 212 matrices have the merged model's numbers in bf16"
    found = exported.checked
    assert found is not None
    assert found.library == ("transformers" if find_spec("llama_cpp") is None else "llama.cpp")
    assert found.agrees
    assert found.effect > 1
    assert "TEMPLATE" in (tmp_path / "o" / "Modelfile").read_text()
    if converter.quantize is None:
        return
    smaller = export_checkpoint(trained_small_model, tmp_path / "q", gguf_type="q4_k_m", **given)
    assert "q4_k_m moves numbers by" in smaller.found
    reader = gguf.GGUFReader(tmp_path / "q" / "model-q4_k_m.gguf")
    assert {"Q4_K", "Q6_K"} <= {tensor.tensor_type.name for tensor in reader.tensors}
    assert sum(tensor.n_bytes for tensor in reader.tensors) < 0.5 * (tmp_path / "o" / "model-bf16.gguf").stat().st_size


def test_what_the_real_converter_refuses_is_said_in_its_own_words(
    converter: LlamaCpp, tuned: Any, tmp_path: Path
) -> None:
    """The tiny model's tokenizer is none that llama.cpp knows."""
    trained: Tuned = tuned("qwen3")
    with pytest.raises(InvalidRequestError, match=r"refuses the model: .*BPE pre-tokenizer was not recognized"):
        export_checkpoint(
            trained.checkpoint,
            tmp_path / "o",
            to="gguf",
            base=str(trained.model),
            llama_cpp=os.environ.get("LLAMA_CPP"),
        )
    assert not list(tmp_path.iterdir())
