"""Rotary positions of vLLM on a CPU, of queries and keys that are heads or rows."""

import pytest
import torch
from tinker_local.backend.vllm_engine.build_engine import prepare_environment, process_state_kept
from tinker_local.backend.vllm_engine.compat_vllm import runs_on_cpu
from tinker_local.backend.vllm_engine.rotary_on_cpu import read_heads

pytestmark = pytest.mark.more


def test_heads_turn_as_their_rows_do() -> None:
    if not runs_on_cpu():
        pytest.skip("for vLLM on a CPU")
    prepare_environment()
    with process_state_kept():
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.rotary_embedding import get_rope

        read_heads()
        with set_current_vllm_config(VllmConfig()):
            rotary = get_rope(32, max_position=64, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    positions = torch.arange(6)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(6, 4, 32, generator=generator), torch.randn(6, 2, 32, generator=generator)
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    heads = rotary.forward_cpu(positions, query.clone(), key.clone())
    rows = rotary.forward_cpu(positions, query.flatten(1).clone(), key.flatten(1).clone())
    for ours, row, theirs in zip(heads, rows, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row.view(theirs.shape), theirs, rtol=1e-5, atol=1e-5)
    alone, nothing = rotary.forward_cpu(positions, query.clone())
    torch.testing.assert_close(alone, expected[0], rtol=1e-5, atol=1e-5)
    assert nothing is None
