"""How a server is addressed."""

_OF_OPENAI = ("/oai/api/v1", "/anthropic/api/v1", "/api/v1", "/v1")


def end_of_openai(url: str) -> str:
    """The end of a `url` that is meant for clients of OpenAI's or Anthropic's API; empty otherwise. Tinker's clients
    add their own path."""
    return next((end for end in _OF_OPENAI if url.endswith(end)), "")
