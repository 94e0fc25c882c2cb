"""Identifiers: `{session}:train:{n}`, `{session}:sample:{n}`, and request ids made of them."""


def model_id(session_id: str, model_seq_id: int) -> str:
    """The id of a model, which is also its training run's; the SDK computes it by itself."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, seq_id: int) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{seq_id}"


def request_id(owner: str, seq_id: int | str) -> str:
    """The request id of operation `seq_id` of a model or sampling session."""
    return f"{owner}:{seq_id}"


def owner_of(request: str) -> str:
    """The model or sampling session of a request id."""
    return request.rpartition(":")[0]


def session_of(owner: str) -> str:
    """The session of a model or sampling session."""
    return owner.rsplit(":", 2)[0]
