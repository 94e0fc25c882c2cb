"""Qwen3: queries and keys have norms."""

from tinker_local.backend.families.interface import Family

FAMILY = Family()
