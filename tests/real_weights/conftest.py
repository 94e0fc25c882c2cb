"""A server of the small real model, for all tests here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import Server, start_server

NAME = "smollm2"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")  # it takes 7 GiB: not for as long as this worker lives
def small_server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("small") / "data", "--model", f"{NAME}={small_model}")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def service(small_server: Server) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=small_server.url, api_key="tml-local") as one:
        yield one


@pytest.fixture(scope="session")
def tokenizer(small_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(small_model)


@dataclass
class Reference:
    """transformers' own model of `folder`."""

    folder: Path

    def logprobs(self, dtype: torch.dtype, *texts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Of each token after the first of each text, [sum of lengths minus one each]."""
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()
        found = []
        with torch.no_grad():
            for ids in map(torch.from_numpy, texts):
                hidden = model.model(input_ids=ids[None]).last_hidden_state[0, :-1]
                for part, targets in zip(hidden.split(512), ids[1:].split(512), strict=True):
                    logprobs = model.lm_head(part).log_softmax(-1)
                    found.append(logprobs.gather(1, targets[:, None])[:, 0].double().numpy())
        return np.concatenate(found)


@pytest.fixture(scope="session")
def reference(small_model: Path) -> Reference:
    return Reference(small_model)


@pytest.fixture(scope="session")
def real_text(tokenizer: Any) -> npt.NDArray[np.int64]:
    """Token ids of this project's pages, more than the model's context."""
    pages = "\n\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")) if page.name != "promises.md")
    return np.array(tokenizer.encode(pages[:60_000]), np.int64)
