"""Quotas: the most that a session, an owner, and all owners together may have of what they share.

A server with one owner has no quota for it: it may have all. With several owners each may have half, so that one alone
never takes what is left from the others; `--quota` says otherwise. Admins have no quota, unless it is theirs by name.

Over a quota that waiting helps (queued requests, samples) a request is HTTP 429, and the client sends it again. Over
one that it does not (adapters, storage) it is refused, with the numbers and what to end or delete. Over that of
ephemeral sampler versions, the least recently used are dropped.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace

from tinker_local.backend.options import BackendOptions, OwnerQuota
from tinker_local.backend.sampling.prompt_scores import MAX_CELLS
from tinker_local.backend.storage.records import ADMIN, LOCAL_OWNER
from tinker_local.backend.threads import Ledger
from tinker_local.types import EncodedTextChunk, ImageChunk, SampleRequest, TooManyRequestsError


@dataclass(frozen=True, slots=True)
class Amounts:
    """So much of each: what is used, or the most that may be (infinity: no limit).

    Attributes
    ----------
    adapters, adapter_bytes: of training runs in memory, and their bytes with gradients and optimizer state.
    queued_requests: training requests that have not run.
    queued_bytes: of these, and as much again of requests for samples that have not ended.
    samples: requests for samples that have not ended, or whose answer is still being sent.
    storage_bytes: of checkpoints of every kind, autosaves included; a copy counts in full.
    ephemeral_bytes: of ephemeral sampler versions.
    """

    adapters: float = math.inf
    adapter_bytes: float = math.inf
    queued_requests: float = math.inf
    queued_bytes: float = math.inf
    samples: float = math.inf
    storage_bytes: float = math.inf
    ephemeral_bytes: float = math.inf


class Owners:
    """The owners of the keys of a server, admins included; made anew when the keys change."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self._several = len(self.names - {ADMIN}) > 1

    def shares(self, owner: str) -> bool:
        """Whether there are several, so that `owner` may have half of what all may have; an admin may have all."""
        return self._several and owner != ADMIN


ONE_OWNER = Owners({LOCAL_OWNER})
"""Of a server without a key file."""


class Quotas:
    """The limits of `options`.

    `owners`: gives the owners of keys, if there is a key file. `disk_bytes`: of the disk of the data folder.
    """

    def __init__(self, options: BackendOptions) -> None:
        self.all = Amounts(
            adapters=options.max_adapters,
            adapter_bytes=math.inf if options.max_adapter_bytes is None else options.max_adapter_bytes,
            queued_requests=options.max_queued_requests,
            queued_bytes=options.max_queued_bytes,
            samples=options.max_queued_samples,
            ephemeral_bytes=options.max_ephemeral_bytes,
        )
        self.session = Amounts(
            queued_requests=options.max_queued_requests_per_session,
            queued_bytes=options.max_queued_bytes_per_session,
            samples=options.max_queued_samples_per_session,
            ephemeral_bytes=options.max_ephemeral_bytes_per_session,
        )
        self.owners: Callable[[], Owners] = lambda: ONE_OWNER
        self.disk_bytes = math.inf
        # Those by name come last.
        self._given: Sequence[OwnerQuota] = sorted(options.quotas, key=lambda given: given.owner is not None)

    def of(self, owner: str) -> Amounts:
        """The most that `owner` may have."""
        most = Amounts()
        if self.owners().shares(owner):
            most = replace(_half(self.all), storage_bytes=_half_of(self.disk_bytes))
        for given in self._given:
            if given.owner == owner or (given.owner is None and owner != ADMIN):
                most = replace(most, **dict(given.most))
        return most

    def levels(self, owner: str) -> tuple[tuple[str, Amounts], ...]:
        """The most that a session of `owner` may have, all of them, and all owners together; each with its name."""
        return ("this session", self.session), (f"the owner {owner!r}", self.of(owner)), ("all sessions", self.all)


def _half(amounts: Amounts) -> Amounts:
    return Amounts(*(_half_of(getattr(amounts, field.name)) for field in fields(amounts)))


def _half_of(amount: float) -> float:
    return amount if math.isinf(amount) else math.ceil(amount / 2)


SAMPLE_RETRY = 1.0
"""Seconds after which a request for samples is to be sent again; the SDK waits for 1 or 5, whatever this is."""


class InFlight:
    """Requests for samples that have not ended; those of OpenAI's and Anthropic's APIs, until their answers are
    delivered."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._by_session: Ledger[str] = Ledger()
        self._by_owner: Ledger[str] = Ledger()
        self._bytes_by_session: Ledger[str] = Ledger()
        self._bytes_by_owner: Ledger[str] = Ledger()

    def check(self, session_id: str, owner: str, size: int) -> None:
        """TooManyRequestsError if one more, of `size` bytes, is too many. One that is alone is not, however large."""
        held_by = (
            (self._by_session[session_id], self._bytes_by_session[session_id]),
            (self._by_owner[owner], self._bytes_by_owner[owner]),
            (len(self), self._bytes_by_owner.total()),
        )
        for (whose, most), (samples, held) in zip(self._quotas.levels(owner), held_by, strict=True):
            if samples >= most.samples:
                raise TooManyRequestsError(
                    f"{samples} requests for samples of {whose} are in flight, the most is {most.samples}", SAMPLE_RETRY
                )
            if samples and held + size > most.queued_bytes:
                raise TooManyRequestsError(
                    f"requests for samples of {held} bytes of {whose} are in flight, with this one of {size} bytes "
                    f"they would exceed the most, {most.queued_bytes} bytes",
                    SAMPLE_RETRY,
                )

    def enter(self, session_id: str, owner: str, size: int) -> Callable[[], None]:
        """Count one more; what counts it out again, once however often it is called."""
        self._count(session_id, owner, 1, size)
        counted = True

        def leave() -> None:
            nonlocal counted
            if counted:
                counted = False
                self._count(session_id, owner, -1, -size)

        return leave

    def _count(self, session_id: str, owner: str, requests: int, size: int) -> None:
        self._by_session[session_id] += requests
        self._by_owner[owner] += requests
        self._bytes_by_session[session_id] += size
        self._bytes_by_owner[owner] += size

    def of(self, owner: str) -> int:
        """Those of `owner`."""
        return self._by_owner[owner]

    def owners(self) -> Collection[str]:
        """Owners that have any."""
        return self._by_owner.keys()

    def __len__(self) -> int:
        return self._by_owner.total()


SEQUENCE_BYTES = 128
"""Counted for each sequence that is asked for: its share of what the server keeps until the request has ended."""


TOPK_BYTES, DRAWN_BYTES, SCORE_BYTES = 8, 12, 4
"""Of an answer's cell: id and logprob of one of the likeliest tokens, of one that was drawn, and a logprob alone."""


def request_bytes(request: SampleRequest) -> int:
    """What a request holds until it has ended: tokens, images, questions about the prompt, answers to them, its
    sequences."""
    size, rows = SEQUENCE_BYTES * request.num_samples, 0
    for chunk in request.prompt.chunks:
        if isinstance(chunk, EncodedTextChunk):
            size += chunk.tokens.nbytes
            rows += chunk.tokens.size
        elif isinstance(chunk, ImageChunk):
            size += len(chunk.data)
    for k, cell_bytes in ((request.topk_prompt_logprobs, TOPK_BYTES), (request.prompt_alt_tokens_k, DRAWN_BYTES)):
        size += cell_bytes * min(rows * k, MAX_CELLS)  # more will be refused
    if (target := request.target_prompt_logprobs) is not None:
        arrays = (target.data, target.sparse_crow_indices, target.sparse_col_indices)
        size += sum(array.nbytes for array in arrays if array is not None) + SCORE_BYTES * target.data.size
    return size
