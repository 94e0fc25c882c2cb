"""Benchmarks are programs, not a package: their folder is put on the path, as it is when one of them runs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
