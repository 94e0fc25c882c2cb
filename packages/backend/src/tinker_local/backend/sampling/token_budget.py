"""What of the context a prompt leaves to be sampled. It loads neither torch nor vLLM."""

from tinker_local.types import InvalidRequestError


def token_budget(prompt_length: int, max_tokens: int | None, limit: int) -> int:
    """How many tokens may be sampled; InvalidRequestError if the prompt and they exceed the context `limit`."""
    if prompt_length < 1:
        raise InvalidRequestError("prompt: there are no chunks; at least one token is needed")
    wanted = max(limit - prompt_length, 1) if max_tokens is None else max_tokens
    if prompt_length + wanted > limit:
        raise InvalidRequestError(
            "Prompt length plus max_tokens exceeds the model's context window: "
            f"{prompt_length} prompt tokens + {wanted} max_tokens > {limit}"
        )
    return wanted
