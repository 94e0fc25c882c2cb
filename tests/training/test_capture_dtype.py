"""A bfloat16 sampler receives half the bytes: the weights rounded to nearest. Checkpoints are never rounded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker_local.backend.adapters.adapter_files import WEIGHTS, adapter_bytes, write_adapter
from tinker_local.backend.adapters.adapter_tensors import as_torch, bfloat16_bits
from tinker_local.backend.models.adapter_check import explained_by_rounding
from tinker_local.backend.rendering.rendered_input import RenderedInput


@pytest.fixture
def captured(trainer: Any, add_adapter: Any) -> Any:
    ours = trainer("qwen3")
    add_adapter(ours, "a", rank=5)
    return {dtype: ours.capture("a", optimizer=False, dtype=dtype) for dtype in ("float32", "bfloat16")}


def test_bfloat16_is_the_weights_rounded_to_the_nearest_in_half_the_bytes(captured: Any) -> None:
    exact, short = captured["float32"].tensors, captured["bfloat16"].tensors
    assert exact.keys() == short.keys()
    for name, array in short.items():
        assert array.shape == exact[name].shape
        assert torch.equal(as_torch(array), torch.from_numpy(exact[name]).to(torch.bfloat16)), name
    assert adapter_bytes(captured["bfloat16"]) * 2 == adapter_bytes(captured["float32"])


def test_rounding_is_measured_on_the_numbers_and_not_on_their_bits(trainer: Any, captured: Any) -> None:
    """Of a version for a sampler in 16 bits, whose save differs by more than is usual."""
    probes = [RenderedInput(np.arange(5, 25, dtype=np.int32))]
    exact, short = (explained_by_rounding(captured[each], trainer("qwen3"), probes) for each in ("float32", "bfloat16"))
    assert 0 < exact < 4 * short
    assert 0 < short < 4 * exact


def test_a_folder_of_bfloat16_is_read_by_safetensors_as_it_was(captured: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_adapter(tmp_path, captured["bfloat16"])
    tensors = load_file(tmp_path / WEIGHTS)
    for name, array in captured["bfloat16"].tensors.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], as_torch(array))


def test_bits_without_torch_are_those_of_torch() -> None:
    """Round to nearest, ties to even, including the smallest and largest numbers."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    halfway = (np.arange(2**16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)).view(np.float32)
    values = np.concatenate([drawn, halfway, np.float32([0, -0.0, 1e-45])])
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16_bits(values), expected)


def test_a_captured_adapter_is_one_vector_whose_parts_are_the_matrices(captured: Any) -> None:
    """Hundreds of matrices are copied, sent and checked as one, also after pickling."""
    import pickle

    for state in captured.values():
        tensors = state.tensors
        assert len(tensors) == len(list(tensors)) == len(dict(tensors))
        assert sum(array.size for array in tensors.values()) == tensors.flat.size
        for array in tensors.values():
            assert np.shares_memory(array, tensors.flat)
        again = pickle.loads(pickle.dumps(tensors))
        for name in tensors:
            np.testing.assert_array_equal(again[name], tensors[name])
