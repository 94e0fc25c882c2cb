"""`python -m tinker_local.backend.process DESCRIPTOR`; only `ChildProcess` starts it."""

import sys

from tinker_local.backend.process.child import main

main(int(sys.argv[1]))
