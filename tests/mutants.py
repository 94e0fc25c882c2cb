"""Break code by rule, with cosmic-ray, and list what no test notices: `make mutants`.

    python -m tests.mutants losses|scheduling [--file NAME]

Each operator, number and condition of the folder is changed in turn, in a copy of the repository, and the tests of the
folder run. Most of what survives changes nothing that one could test; the rest lacks a test. Takes about eight seconds
for each change: an hour or more for `losses`, many for `scheduling`, seven minutes for `losses --file ppo.py`. uv
fetches cosmic-ray.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations import ROOT, TEST_SECONDS, Copy

CODE = "packages/backend/src/tinker_local/backend"
FOLDERS = {
    "losses": (
        f"{CODE}/training/losses",
        "tests/training/test_loss_formulas.py tests/training/test_loss_input_checks.py",
    ),
    "scheduling": (f"{CODE}/scheduling", "tests/scheduling"),
}
COSMIC_RAY = ("uv", "tool", "run", "--quiet", "--from", "cosmic-ray==8.7.0")
SETTINGS = """\
[cosmic-ray]
module-path = "{code}"
timeout = {timeout:.1f}
excluded-modules = []
test-command = "'{python}' -m pytest -x -q -p no:cacheprovider {tests}"
[cosmic-ray.distributor]
name = "local"
"""


def report(code: str, tests: str, copy: Path) -> None:
    """Print the changes of `code`, a file or a folder below `copy`, that `tests` do not notice."""
    settings = SETTINGS.format(code=code, tests=tests, timeout=TEST_SECONDS, python=sys.executable)
    (copy / "mutants.toml").write_text(settings)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(copy), *(str(path) for path in copy.glob("packages/*/src"))]),
        "EXAMPLES": "4",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([os.environ["PATH"], str(ROOT / ".uv" / "bin")]),
    }

    def run(*command: str) -> None:
        subprocess.run([*COSMIC_RAY, *command], cwd=copy, env=environment, check=True)

    run("cosmic-ray", "baseline", "mutants.toml")
    run("cosmic-ray", "init", "mutants.toml", "found.sqlite")
    run("cosmic-ray", "exec", "mutants.toml", "found.sqlite")
    run("cr-report", "--surviving-only", "--show-diff", "found.sqlite")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", choices=FOLDERS)
    parser.add_argument("--file", help="one file of it")
    options = parser.parse_args()
    code, tests = FOLDERS[options.folder]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder).resolve()).folder
        report(f"{code}/{options.file}" if options.file else code, tests, copy)


if __name__ == "__main__":
    main()
