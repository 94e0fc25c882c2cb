"""Tokens in URLs that may be fetched without a key: signed by itsdangerous, with an expiry.

The secret is a file in the data folder. URLs therefore survive a restart, and another server's are refused.
"""

import hashlib
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from itsdangerous import BadData, URLSafeSerializer
from tinker_local.backend.storage.data_folder import fsync_path
from tinker_local.types import PermissionDeniedError

LIFETIME = timedelta(hours=1)
"""How long a token is valid."""

SECRET = "signing.key"
SECRET_BYTES = 32


class Signatures:
    """Signs what a URL gives access to; `clock` decides when a token expires."""

    def __init__(self, data_dir: Path, clock: Callable[[], datetime]) -> None:
        signer = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
        self._tokens = URLSafeSerializer(load_secret(data_dir), salt="tinker_local.urls", signer_kwargs=signer)
        self._clock = clock

    def sign(self, *what: str | int, until: datetime | None = None) -> str:
        """A token for `what`, valid until `until` (in whole seconds), by default for `LIFETIME`."""
        until = until or self._clock() + LIFETIME
        return str(self._tokens.dumps([int(until.timestamp()), *what]))

    def check(self, token: str, *what: str | int) -> None:
        """PermissionDeniedError unless `token` was signed for `what` and has not expired."""
        try:
            expires, *signed = self._tokens.loads(token)
        except BadData:
            signed = []
        if signed != list(what):
            raise PermissionDeniedError("token: this server did not sign it for this file; ask for the URL again")
        if self._clock().timestamp() >= expires:
            when = datetime.fromtimestamp(expires, UTC).isoformat()
            raise PermissionDeniedError(f"token: this URL expired at {when}; ask for the URL again")


def load_secret(data_dir: Path) -> bytes:
    """The secret of `data_dir`, created if there is none; RuntimeError if its file has another size."""
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
