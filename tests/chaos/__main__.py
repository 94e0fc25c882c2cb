"""A chaos run on fakes: python -m tests.chaos [--minutes 30] [--seed 1] prints its counts."""

import argparse
import faulthandler
import signal
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with this
    faulthandler.register(signal.SIGUSR1)
    from tests.chaos.chaos_run import chaos

    report = chaos(60 * arguments.minutes, arguments.seed, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(report)
    return int(bool(report.violations))


sys.exit(main())
