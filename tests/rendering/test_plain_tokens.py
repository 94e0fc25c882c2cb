"""Promise 11: a text-only model input reaches vLLM as the plain list of its tokens, however it was cut."""

from typing import Any

import numpy as np
from tinker_local.backend.vllm_engine.engine_inputs import engine_prompt
from tinker_local.types import EncodedTextChunk, ModelInput


def test_text_in_any_number_of_chunks_is_vllms_plain_token_input(text_renderer: Any) -> None:
    from vllm.inputs import tokens_input

    ids = np.random.default_rng(0).integers(0, 300, 50)
    for cuts in ([], [1], [49], [10, 20, 30]):
        chunks = tuple(EncodedTextChunk(tokens=part) for part in np.split(ids, cuts))
        prompt = text_renderer.render(ModelInput(chunks=chunks), "prompt")
        assert engine_prompt(prompt) == tokens_input(ids.tolist())
