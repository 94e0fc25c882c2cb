"""Who calls: the owner of what a request creates.

A session belongs to the owner who created it, and its training runs, samplers and checkpoints with it.
"""

from dataclasses import dataclass

from tinker_local.backend.storage.records import LOCAL_OWNER


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of what a request creates; it sees only what belongs to `owner`, or with `admin` everything."""

    owner: str
    admin: bool = False


LOCAL = Caller(LOCAL_OWNER, admin=True)
"""A program in this process, or any caller of a server without a key file."""


def owner_urn(owner: str) -> str:
    """An owner on the wire."""
    return f"tml:organization_user:{owner}"
