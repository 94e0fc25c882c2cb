"""Ranks of a real trainer are killed and stopped in steps: they start again by themselves, and others never notice."""

from pathlib import Path

import pytest
import torch

from tests.chaos.rank_kills import OTHER, VICTIM, rank_faults


@pytest.mark.rotated(2)
@pytest.mark.more  # starts a server with vLLM, and its ranks several times
@pytest.mark.timeout(3600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one GPU has no room for two ranks' collectives")
@pytest.mark.parametrize("shard", ["never", "2"])
def test_ranks_killed_and_stopped_in_steps_leave_nothing_behind_and_runs_go_on_from_the_same_states(
    tmp_path: Path, shard: str
) -> None:
    report = rank_faults(tmp_path, kills=3, stops=1, seed=2, shard=shard)
    print(report)
    assert report.violations == []
    assert len(report.recovered) >= 4
    assert all(report.others[what] for what in (f"steps of {OTHER}", f"samples of {OTHER}", f"samples of {VICTIM}"))
