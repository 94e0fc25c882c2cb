"""How a server is addressed."""

_OF_OPENAI = ("/oai/api/v1", "/anthropic/api/v1", "/api/v1", "/v1")


def end_of_openai(url: str) -> str:
    """What `url` has at its end if it is for clients of OpenAI's or Anthropic's API, and empty otherwise: Tinker's add
    theirs."""
    return next((end for end in _OF_OPENAI if url.endswith(end)), "")
