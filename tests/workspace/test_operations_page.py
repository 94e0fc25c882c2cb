"""docs/operations.md lists every option and every metric, as the code has them."""

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
