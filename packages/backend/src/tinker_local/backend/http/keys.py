"""The API keys of a server, and the tokens that open a checkpoint of somebody else, which are such keys."""

import hmac
from collections.abc import Sequence
from typing import TypeVar

from tinker_local.types import CopyWeightsRequest, LoadWeightsRequest, PermissionDeniedError

R = TypeVar("R", CopyWeightsRequest, LoadWeightsRequest)


class Keys:
    """`keys`: those that are let in; None lets every key in."""

    def __init__(self, keys: Sequence[str] | None) -> None:
        self._keys = None if keys is None else [key.encode() for key in keys]

    def known(self, given: str) -> bool:
        """Whether `given` is a key of this server."""
        if self._keys is None:
            return True
        # Every key is compared, so that the time taken tells nothing.
        return sum(hmac.compare_digest(given.encode(), key) for key in self._keys) > 0

    def check_token(self, token: str | None, field: str) -> None:
        """PermissionDeniedError for an access token that is no key of this server. On the hosted service, too, an API
        key of the owner is such a token; here there is one owner, so a right token opens what is open anyway."""
        if token is not None and not self.known(token):
            raise PermissionDeniedError(
                f"{field}: it is not a key of this server; give one, or leave it out: whoever has a key of this "
                "server reads every checkpoint"
            )

    def opened(self, request: R) -> R:
        """`request` without its token, which was right."""
        self.check_token(request.weights_access_token, "weights_access_token")
        return request.model_copy(update={"weights_access_token": None})
