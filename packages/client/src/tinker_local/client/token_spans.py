"""`weights_of_tokens`: which weights drew the tokens of a sample of an in-flight client."""

from dataclasses import dataclass
from urllib.parse import quote

import tinker
from tinker_local.client.endpoint import connect, send
from tinker_local.types import InvalidRequestError


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """`tokens` in a row that were drawn under one version of a run's weights.

    `version`: the number of the in-flight save, from 1. `optimizer_steps`: of the run at that save; what the run has
    taken since is how stale the tokens are. `on_older_keys`: keys and values of positions before them may be of an
    earlier version, so that no single version computes their logprobs again.
    """

    version: int
    optimizer_steps: int
    tokens: int
    on_older_keys: bool


def weights_of_tokens(
    sequence: "tinker.SampledSequence | str", *, base_url: str | None = None, api_key: str | None = None
) -> list[WeightsSpan]:
    """The spans of a sequence that a client made with `kind="inflight"` has sampled, in order; their tokens add up to
    its own.

    Args:
        sequence: The sequence, or its `sequence_id`.
        base_url: As those of `ServiceClient`.
        api_key: As those of `ServiceClient`.

    Raises tinker.NotFoundError for a sequence of another client, of a session that has ended, or that is not among
    the newest 65,536 of its session.
    """
    sequence_id = sequence if isinstance(sequence, str) else getattr(sequence, "sequence_id", None)
    if not isinstance(sequence_id, str) or sequence_id.count(":") < 2:
        raise InvalidRequestError(f"sequence: must be a SampledSequence of this server or its id, not {sequence!r}")
    sampler = sequence_id.rsplit(":", 2)[0]
    path = f"samplers/{quote(sampler)}/weights_of_tokens?sequence_id={quote(sequence_id)}"
    answer = send(connect(base_url, api_key, check_server=False), "GET", path, timeout=30)
    return [WeightsSpan(**span) for span in answer.json()["drawn_under"]]
