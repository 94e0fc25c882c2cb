"""Promise 12: a missing chunk is waited for as long as the SDK may still send it, by default 360 seconds."""

from tinker_local.backend.options import BackendOptions
from tinker_local.backend.scheduling.run_queue import GAP_PATIENCE, CommandLog

SDK_RETRIES_SECONDS = 300


def test_default_patience_outlasts_the_sdks_retries() -> None:
    assert BackendOptions().gap_patience == GAP_PATIENCE == 360 > SDK_RETRIES_SECONDS
    log: CommandLog[str] = CommandLog()
    log.add(2, "chunk", chunk=True, now=0)
    assert log.deadline() == 360
