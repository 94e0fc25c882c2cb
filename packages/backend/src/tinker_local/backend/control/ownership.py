"""Whose everything is: a local server has one owner and one project."""

from tinker_local.types import UnsupportedError

OWNER = "tml:organization_user:local"

PROJECT = "local"
"""The id of the only project, for callers that have to name one: `copy_weights` of the SDK does."""


def check_project(project_id: str | None, field: str) -> None:
    """UnsupportedError for another project than `PROJECT`; None names none."""
    if project_id is not None and project_id != PROJECT:
        raise UnsupportedError(
            f"{field}: a local server has one project, {PROJECT!r}, and not {project_id!r}; leave it out "
            f"(unset TINKER_PROJECT_ID), or give {PROJECT!r} where one is demanded"
        )


def check_no_token(token: str | None) -> None:
    """UnsupportedError for a token: in this process there are no keys, and it opens nothing that is not open. (The HTTP
    app takes keys of the server for tokens.)"""
    if token is not None:
        raise UnsupportedError("weights_access_token: this process reads every checkpoint without one; leave it out")
