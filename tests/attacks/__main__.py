"""Attacks on a server that it starts: python -m tests.attacks [NAME or ITEM ...] prints a table.

`--list` names them; `attacker NAME URL KEY MODEL` is the process of one (attacker.py); `faults` prints the matrix of
start-up faults.
"""

import os
import signal
import sys
import time
from datetime import UTC, datetime


def main() -> int:
    if sys.argv[1:2] == ["attacker"]:
        from tests.attacks import attacker

        attacker.main(*sys.argv[2:6])
    if sys.argv[1:2] == ["faults"]:
        from tests.attacks.start_up_faults import print_matrix

        return print_matrix()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with this
    from tests.attacks.measured_attacks import HEAD, chosen, line, measure

    attacks = chosen([name for name in sys.argv[1:] if not name.startswith("--")])
    if "--list" in sys.argv:
        for each in attacks:
            print(f"{each.item:3} {each.name:24} {each.serving:7} {(each.program.__doc__ or '').splitlines()[0]}")
        return 0
    now, load = datetime.now(UTC), os.getloadavg()[0]
    print(f"{now:%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load {load:.1f}\n\n{HEAD}", flush=True)
    failed = 0
    for each in attacks:
        start = time.monotonic()
        outcome = measure(each)
        print(line(outcome), flush=True)
        for fault in outcome.faults():
            print(f"  {each.name}: {fault}", file=sys.stderr, flush=True)
        print(f"  load {os.getloadavg()[0]:.1f}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        failed += bool(outcome.faults())
    return int(failed > 0)


sys.exit(main())
