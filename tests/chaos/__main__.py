"""A chaos run on fakes: python -m tests.chaos [--minutes 30] [--seed 1] [--log FILE] prints its counts."""

import argparse
import faulthandler
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where the server's own log is written")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with this
    faulthandler.register(signal.SIGUSR1)
    from tests.chaos.chaos_run import chaos

    def say(text: str) -> None:
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    report = chaos(60 * arguments.minutes, arguments.seed, say=say, log=arguments.log)
    print(report)
    return int(bool(report.violations))


sys.exit(main())
