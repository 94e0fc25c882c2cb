"""Promise 14: with nothing to do, the engine thread takes no time at all."""

import time

from tinker_local.backend.vllm_engine.engine_thread import EngineThread


def test_an_idle_engine_thread_takes_no_processor_time() -> None:
    thread = EngineThread()
    clock = time.pthread_getcpuclockid(thread._thread.ident)
    time.sleep(0.05)
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    taken = time.clock_gettime(clock) - before
    thread.stop()
    assert taken < 0.01
