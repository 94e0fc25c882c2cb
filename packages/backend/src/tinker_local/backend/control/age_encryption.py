"""Encryption of exports with age (https://age-encryption.org) by pyrage, which is imported when it is asked for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinker_local.types import InvalidRequestError, UnsupportedError

MOST_RECIPIENTS = 10
"""As on the hosted service."""

Encrypt = Callable[[Path, Path], None]
"""Encrypts one file into another, in pieces."""


def encryption_to(recipients: Sequence[str]) -> Encrypt:
    """For `age1...` keys and SSH public keys. InvalidRequestError for others, UnsupportedError without pyrage."""
    field = "age_encryption_recipients"
    if len(recipients) > MOST_RECIPIENTS:
        raise InvalidRequestError(f"{field}: {len(recipients)} recipients; at most {MOST_RECIPIENTS} are allowed")
    try:
        import pyrage  # type: ignore[import-untyped]
    except ImportError:
        raise UnsupportedError(
            f"{field}: pyrage is not installed where the server runs (pip install pyrage); or leave it out, and "
            "encrypt after the download: age -r RECIPIENT -o adapter_model.safetensors.age adapter_model.safetensors"
        ) from None
    parsed = [_parsed(pyrage, recipient, f"{field}[{index}]") for index, recipient in enumerate(recipients)]

    def encrypt(plain: Path, encrypted: Path) -> None:
        pyrage.encrypt_file(str(plain), str(encrypted), parsed)

    return encrypt


def _parsed(pyrage: Any, recipient: str, field: str) -> Any:
    kind = pyrage.ssh if recipient.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(recipient)
    except pyrage.RecipientError as error:
        shown = recipient if len(recipient) <= 80 else f"{recipient[:40]}… ({len(recipient)} characters)"
        raise InvalidRequestError(
            f"{field}: {shown!r} is neither an age1... key nor an SSH public key: {error}"
        ) from None
