"""`python -m tinker_local.backend.training.process DESCRIPTOR`; only `TrainerProcess` starts it."""

import sys

from tinker_local.backend.training.process.child import main

main(int(sys.argv[1]))
