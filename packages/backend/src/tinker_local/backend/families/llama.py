"""Llama 3."""

from tinker_local.backend.families.interface import Family

FAMILY = Family()
