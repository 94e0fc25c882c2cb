"""Qwen3: queries and keys have norms."""

from tinker_local.backend.families.family import Family

FAMILY = Family(tool_parser="hermes")
