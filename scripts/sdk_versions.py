"""Run the end-to-end tests with other versions of the tinker SDK, each in a separate environment, and print a table.

    .venv/bin/python scripts/sdk_versions.py [0.33.0 0.38.0 ...]

Needs `uv` and a package index. Each environment contains only that SDK; everything else, the server included, comes
from this interpreter. Tests of `tinker_local.client` are left out, since it supports one version of the SDK.
"""

import re
import site
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("0.33.0", "0.38.0")
ARGUMENTS = ("tests/e2e", "--ignore=tests/e2e/test_vision_rl.py", "-q", "-p", "no:cacheprovider", "-n", "0")


def main() -> int:
    uv = ROOT / ".uv" / "bin" / "uv"
    lines = [run(version, str(uv) if uv.exists() else "uv") for version in sys.argv[1:] or VERSIONS]
    print(f"\n{'SDK':10} end-to-end tests")
    for version, outcome in lines:
        print(f"{version:10} {outcome}")
    return int(any("passed" not in outcome or re.search("failed|error", outcome) for _, outcome in lines))


def run(version: str, uv: str) -> tuple[str, str]:
    """Run the tests with `version`, pass on their output, and return the result in words."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/bin/python"
        commands = (
            (uv, "venv", "--quiet", "--python", sys.executable, folder),
            (uv, "pip", "install", "--quiet", "--no-deps", "--python", python, f"tinker=={version}"),
        )
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return version, f"cannot be installed: {' '.join(done.stderr.split())[:200]}"
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        # The packages of this environment, with its links to the workspace, come after those of the new one.
        (packages / "behind.pth").write_text(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")
        tests = subprocess.Popen((python, "-m", "pytest", *ARGUMENTS), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert tests.stdout is not None
        last = ""
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        tests.wait()
        return version, last.strip("= ")


if __name__ == "__main__":
    sys.exit(main())
