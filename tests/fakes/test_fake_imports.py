"""The fakes run without the heavy libraries."""

import subprocess
import sys


def test_fakes_load_neither_torch_nor_transformers_nor_vllm() -> None:
    code = (
        "import sys, tinker_local.backend.fakes\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
