"""What a client reads of an error."""

import io

import pytest
from tinker_local.types import ApiError, InternalError, InvalidRequestError


@pytest.mark.parametrize("kind", [InvalidRequestError, InternalError])
def test_no_message_has_an_address_of_memory(kind: type[ApiError]) -> None:
    for foreign in (io.BytesIO(), object(), test_no_message_has_an_address_of_memory):
        assert " at 0x" in repr(foreign)
        text = str(kind(f"data[3]: {foreign!r} is not a picture"))
        assert "0x" not in text
        assert text.startswith("data[3]: <")
        assert text.endswith("> is not a picture")
    assert str(kind("token 0xff")) == "token 0xff"
