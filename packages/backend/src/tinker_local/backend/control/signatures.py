"""Signatures of URLs that may be fetched without a key.

A signature is an HMAC over what may be fetched and until when. Its secret is a file of the data folder, so that URLs
outlive a restart of the server, and no other server's are taken.
"""

import hmac
import json
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tinker_local.backend.storage.data_folder import fsync_path
from tinker_local.types import PermissionDeniedError

LIFETIME = timedelta(hours=1)
"""How long a signature is good for."""

SECRET = "signing.key"
SECRET_BYTES = 32


class Signatures:
    """Signs what one kind of URL is for; `clock` says when that is over."""

    def __init__(self, data_dir: Path, clock: Callable[[], datetime]) -> None:
        self._secret = load_secret(data_dir)
        self._clock = clock

    def expiry(self) -> int:
        """When what is signed now expires: seconds since 1970."""
        return int((self._clock() + LIFETIME).timestamp())

    def sign(self, expires: int, *what: str | int) -> str:
        """The signature of `what` until `expires`; `what` begins with the kind of URL."""
        return hmac.digest(self._secret, json.dumps([*what, expires]).encode(), "sha256").hex()

    def check(self, signature: str, expires: int, *what: str | int) -> None:
        """PermissionDeniedError unless `signature` is that of `what`, and `expires` is to come."""
        right = self.sign(expires, *what)
        if not hmac.compare_digest(signature.encode("utf-8", "replace"), right.encode()):
            raise PermissionDeniedError("signature: it is not this server's for this file; ask for the URL again")
        if self._clock().timestamp() >= expires:
            when = datetime.fromtimestamp(expires, UTC).isoformat()
            raise PermissionDeniedError(f"expires: this URL expired at {when}; ask for the URL again")


def load_secret(data_dir: Path) -> bytes:
    """The secret of `data_dir`, made if there is none; RuntimeError if its file is not one."""
    path = data_dir / SECRET
    if not path.exists():
        unfinished = data_dir / f".{SECRET}.{secrets.token_hex(8)}"
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        fsync_path(unfinished)
        unfinished.rename(path)
        fsync_path(data_dir)
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise RuntimeError(f"{path} has {len(secret)} bytes instead of {SECRET_BYTES}; delete it to make a new one")
    return secret
