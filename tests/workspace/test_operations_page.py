"""docs/operations.md lists every option and every metric, as the code has them."""

import ast
import re
import sys
from pathlib import Path

from tinker_local.backend.cli.serve import serve

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import operations_tables


def test_the_tables_of_operations_are_those_of_the_code() -> None:
    text = operations_tables.PAGE.read_text()
    assert operations_tables.page(text) == text, "run .venv/bin/python scripts/operations_tables.py"


def test_the_table_of_options_has_every_option_of_serve_that_is_one_of_the_backend() -> None:
    table = operations_tables.settings()
    own = {
        "--model",
        "--host",
        "--port",
        "--api-key-file",
        "--trusted-proxy",
        "--access-log",
        "--audit-log",
        "--fake",
        "--verbose",
        "--log-json",
        "--config",
        "--help",
    }
    flags = {option for parameter in serve.params for option in parameter.opts if option.startswith("--")}
    assert len(flags - own) > 15
    assert {flag for flag in flags - own if f"| `{flag}` |" not in table} <= {"--stop-timeout"}


NO_LIMITS = {
    "hosting.keys.MOST_ADDRESSES",  # what the server remembers; older ones are forgotten
    "hosting.keys.MOST_COUNTED",
    "hosting.keys.LONGEST_DELAY",  # seconds after which the server does something
    "models.supervision.LONGEST_PAUSE",
    "scheduling.train_scheduler.LONGEST_WAIT",
    "hosting.notices.MOST_FAILURES",  # lines of the terminal; the rest are counted
    "hosting.request_logs.MOST_BYTES",
    "hosting.request_logs.LONGEST_VALUE",
    "scheduling.operations.LONGEST_ERROR",
    "scheduling.run_queue.MOST_REFUSED",
    "scheduling.run_queue.LONGEST_RETRY",
    "scheduling.run_queue.LONGEST_PAUSE",
    "rendering.text.MOST_UNREAD",
    "control.sampling_clients.MOST_CLIENTS",  # of 63 bits
    "scheduling.image_turns.MOST_RENDERED_BYTES",  # by the machine's memory; docs/sampling.md
    "weight_files.LONGEST_HEADER",  # of safetensors
    "models.adapter_check.MOST_IN_32_BITS",  # nats
    "models.place_engines.MOST_CPU_CACHE",  # of the server's own choice; --kv-cache may be more
}
"""Constants whose names say that they are the most, and that bound nothing which a client sends or sees."""


def test_the_table_of_limits_has_every_constant_that_is_one() -> None:
    """By their names. The engines, which get only what was checked, and folders of tools are left out."""
    source = Path(__file__).parents[2] / "packages"
    found = set()
    for package in ("types/src/tinker_local/types", "backend/src/tinker_local/backend"):
        for file in (source / package).rglob("*.py"):
            path = file.relative_to(source / package).with_suffix("").parts
            if path[0] in ("fakes", "tiny_models", "exporting", "vllm_engine", "training"):
                continue
            module = ".".join(("types", *path) if package.startswith("types") else path)
            for node in ast.parse(file.read_text()).body:
                targets = node.targets if isinstance(node, ast.Assign) else []
                names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
                found |= {f"{module}.{name}" for name in names if re.match("(MAX|MOST|LONGEST)_", name)}
    told = {name for given in operations_tables.LIMITS.values() for names in given.values() for name in names.split()}
    assert len(found) > 60
    assert not found - told - NO_LIMITS, "add them to LIMITS of scripts/operations_tables.py"
    assert found >= NO_LIMITS
    assert not NO_LIMITS & told
    table = operations_tables.limits()
    assert "| 1,024 | `max_num_samples`: Maximum `num_samples` of one sampling request |" in table
    assert all(operations_tables.value_of(name) > 0 for name in told)
