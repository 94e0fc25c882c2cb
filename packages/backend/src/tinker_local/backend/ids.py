"""Identifiers: `{session}:train:{n}`, `{session}:sample:{n}`, and the request ids derived from them."""


def model_id(session_id: str, model_seq_id: int) -> str:
    """The id of a training run and of its model. The SDK computes the same id."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id(session_id: str, seq_id: int) -> str:
    """The id of a sampling session."""
    return f"{session_id}:sample:{seq_id}"


def request_id(owner: str, seq_id: int | str) -> str:
    """The request id of operation `seq_id` of a model or sampling session."""
    return f"{owner}:{seq_id}"


def owner_of(request: str) -> str:
    """The model or sampling session that a request id belongs to."""
    return request.rpartition(":")[0]


def session_of(owner: str) -> str:
    """The session that a model or sampling session belongs to."""
    return owner.rsplit(":", 2)[0]
