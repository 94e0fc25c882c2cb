"""Llama 3."""

from tinker_local.backend.families.family import Family

FAMILY = Family(tool_parser="llama3_json")
