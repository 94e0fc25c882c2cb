"""Environments of packages that this project does not depend on, made by uv."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

UV = Path(__file__).parents[2] / ".uv" / "bin" / "uv"


def made(folder: Path, wanted: Sequence[str]) -> Path:
    """The python of an environment with the packages `wanted` in `folder`; made where it is not there yet."""
    python, stamp = folder / "bin" / "python", folder / "stamp"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        uv = shutil.which("uv") or str(UV)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        print(f"making {folder}: {' '.join(wanted)}", flush=True)
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", version, str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python
