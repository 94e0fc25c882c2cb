"""Prints the table, or writes docs/compatibility.md: python -m tests.compatibility [--write] [NAME ...]"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("TINKER_API_KEY", "tml-local")


def main() -> int:
    from tinker_local.backend.tiny_models import make_tiny_text_model

    from tests.compatibility.surface import surface
    from tests.compatibility.world import World
    from tests.compatibility.write_report import markdown, run_all
    from tests.conftest import TEXT, start_server

    wanted = [name for name in sys.argv[1:] if name != "--write"]
    names = [name for name in surface() if not wanted or any(part in name for part in wanted)]
    with tempfile.TemporaryDirectory() as scratch:
        make_tiny_text_model(Path(scratch) / "text")
        server = start_server(
            Path(scratch) / "data", "--kv-cache", "0.25", "--max-rank", "32", "--model", f"{TEXT}={scratch}/text"
        )
        os.environ["TINKER_BASE_URL"] = server.url
        try:
            lines = run_all(World(server.url, TEXT, "tml-local"), names)
        finally:
            server.stop()
    if "--write" in sys.argv:
        (Path(__file__).parents[2] / "docs" / "compatibility.md").write_text(markdown(lines))
    for line in lines:
        print(f"{line.name:60} {line.status:8} {line.words}")
    return int(any(line.status == "fails" for line in lines))


sys.exit(main())
