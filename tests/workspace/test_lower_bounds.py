"""The lowest versions that the wheels admit have the fixes of advisories that reach this project.

`make advisories` asks for new ones; it needs a network.
"""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]

FIXED = {
    "starlette": "1.0.1",  # requests of anybody are parsed with it
    "pillow": "12.3",  # pictures of anybody are decoded with it
    "protobuf": "5.29.6",  # nested messages of anybody exhausted the stack
    "pyrage": "1.2.3",  # a recipient's name started a program of that name
}
"""The first version without a published advisory that reaches what this project does with the package."""


@pytest.mark.parametrize("package", FIXED)
def test_no_wheel_admits_a_version_with_a_known_advisory(package: str) -> None:
    bounds = []
    for file in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        required = [Requirement(text) for group in (project["dependencies"], *extras) for text in group]
        bounds += [bound for requirement in required if requirement.name == package for bound in requirement.specifier]
    lowest = [Version(bound.version) for bound in bounds if bound.operator in (">=", "==")]
    assert lowest
    assert min(lowest) >= Version(FIXED[package])
