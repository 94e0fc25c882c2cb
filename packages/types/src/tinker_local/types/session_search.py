"""What a search for sessions asks for."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BeforeValidator, Field
from tinker_local.types.base import Frozen, TupleOf

FinishType = Literal["success", "errored", "interrupted"]
"""What a client reports when it ends its session."""


MOST_FOUND = 200
"""Sessions of one page of a search."""


class StatusQuery(Frozen):
    """Sessions that run, were cancelled, or failed because something in them failed."""

    type: Literal["active", "cancelled", "failed"]


class ClientFinishedQuery(Frozen):
    """Sessions whose client ended them for one of `reasons`; None means any."""

    type: Literal["client_finished"]
    reasons: Annotated[TupleOf[FinishType], Field(min_length=1)] | None = None


class OwnerQuery(Frozen):
    """The caller's own sessions, or all that the caller may see."""

    type: Literal["own", "accessible"] = "own"


class UserQuery(Frozen):
    """Sessions of these owners."""

    type: Literal["user"]
    owner_urns: Annotated[TupleOf[str], Field(min_length=1, max_length=10)]


def _moment(value: object) -> object:
    """Parse a time; leave anything else for the strict type to refuse."""
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return value


class SessionCursor(Frozen):
    """The last session of the previous page."""

    last_created_at: Annotated[AwareDatetime, BeforeValidator(_moment)]
    last_session_id: str


class SessionSearchRequest(Frozen):
    """All given filters must match, except that of `session_id` and `display_name` one is enough.

    `display_name`: words that must all occur in the name, ignoring case. `user_metadata`: exact pairs.
    """

    session_id: str | None = None
    project_ids: Annotated[TupleOf[str], Field(min_length=1)] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: Annotated[OwnerQuery | UserQuery, Field(discriminator="type")] = OwnerQuery()
    statuses: (
        Annotated[
            TupleOf[Annotated[StatusQuery | ClientFinishedQuery, Field(discriminator="type")]], Field(min_length=1)
        ]
        | None
    ) = None
    limit: Annotated[int, Field(ge=1, le=MOST_FOUND)] = 50
    cursor: SessionCursor | None = None
