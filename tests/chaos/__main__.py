"""A chaos run on fakes or a tiny real model: python -m tests.chaos [--real] [--minutes 30] [--seed 1] [--log FILE].

Other options go to `tinker-local serve`: `--train-gpus 0,1 --sample-gpus 0,1` has two ranks and two replicas.
"""

import argparse
import faulthandler
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--real", action="store_true", help="vLLM and transformers instead of fakes")
    parser.add_argument("--in-flight", action="store_true", help="asynchronous loops, and one run beside them")
    parser.add_argument("--log", type=Path, help="where the server's own log is written")
    arguments, others = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with this
    faulthandler.register(signal.SIGUSR1)
    from tests.chaos.chaos_run import all_users, asynchronous_loops, chaos
    from tests.chaos.served import served_fake, served_tiny

    def say(text: str) -> None:
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        served = served_tiny(Path(scratch, "model")) if arguments.real else served_fake()
        served = replace(served, arguments=(*served.arguments, *others))
        users = asynchronous_loops if arguments.in_flight else all_users
        minutes, seed = arguments.minutes, arguments.seed
        report = chaos(served, 60 * minutes, seed, make_users=users, say=say, log=arguments.log)
    print(report)
    return int(bool(report.violations))


sys.exit(main())
