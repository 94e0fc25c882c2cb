"""`python -m tinker_local.backend.training.process DESCRIPTOR`: started by `TrainerProcess` and by nobody else."""

import sys

from tinker_local.backend.training.process.child import main

main(int(sys.argv[1]))
