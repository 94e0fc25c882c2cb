"""A pytest plugin for `mutations.py`: what failed, in which phase and why, and whether the copy was imported."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

COPY = Path(os.environ["MUTATED_COPY"])
PACKAGES = ("tinker_local.types", "tinker_local.client", "tinker_local.backend")

failed_in: dict[str, list[str]] = {}
reasons: dict[str, str] = {}


def pytest_runtest_logreport(report: Any) -> None:
    phases = failed_in.setdefault(report.nodeid, [])
    if report.failed:
        # pytest-timeout fails a test in its body, too; a test that hangs proves nothing.
        timed_out = "Timeout (>" in str(report.longrepr)
        phases.append("timeout" if timed_out else report.when)
        crash = getattr(report.longrepr, "reprcrash", None)
        reasons.setdefault(report.nodeid, str(crash.message if crash else report.longrepr))


def pytest_sessionfinish() -> None:
    imported = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    files = {name: file for name, file in imported.items() if name.startswith("tinker_local.") and file}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        files.setdefault(name, None if spec is None else spec.origin)
    foreign = {name: file for name, file in files.items() if not file or not Path(file).is_relative_to(COPY)}
    (COPY / "outcome.json").write_text(json.dumps({"failed_in": failed_in, "reasons": reasons, "foreign": foreign}))
