"""How long a checkpoint lives, if a request says so."""

from datetime import datetime, timedelta

from tinker_local.types import InvalidRequestError

MIN_TTL, MAX_TTL = 3600, 10 * 365 * 86400
"""Seconds; the hosted service's bounds."""


def check_ttl(seconds: int | None) -> None:
    """InvalidRequestError for a life time outside one hour to ten years."""
    if seconds is not None and not MIN_TTL <= seconds <= MAX_TTL:
        raise InvalidRequestError(f"ttl_seconds: {seconds} is outside {MIN_TTL} (an hour) to {MAX_TTL} (ten years)")


def expiry(begin: datetime, seconds: int | None) -> datetime | None:
    """When what lives `seconds` from `begin` on expires; None: never."""
    return None if seconds is None else begin + timedelta(seconds=seconds)
