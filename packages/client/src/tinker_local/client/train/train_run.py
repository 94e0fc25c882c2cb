"""`train`: a run from the data to its last checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import tinker
from tinker_local.client.clients import RestClient, ServiceClient
from tinker_local.client.endpoint import send
from tinker_local.client.train.evaluate import Answerer, Evaluation, ends_of
from tinker_local.client.train.examples import Rows
from tinker_local.client.train.guidance import ModelFacts, advise, facts_of, rank_for
from tinker_local.client.train.interrupts import Interrupts
from tinker_local.client.train.loop import Loop
from tinker_local.client.train.objectives import Objective, Say, Supervised
from tinker_local.client.train.preferences import Preferences
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import read_rows
from tinker_local.client.train.run_folder import RunFolder, RunRecord, SavedStep
from tinker_local.client.train.schedule import Plan, split_rows
from tinker_local.client.train.server_watch import ServerWatch
from tinker_local.client.train.settings import TrainSettings, check_unchanged
from tinker_local.client.train.trackers import TrackedRun, Tracker, open_tracker
from tinker_local.types import InvalidRequestError


class Decodes(Protocol):
    """What is needed here of a model's chat format: a tokenizer whose `decode` is HF's."""

    @property
    def tokenizer(self) -> Any: ...


Data: TypeAlias = str | Path | Rows | Callable[[Any, int], Rows]
"""A file or folder for `read_rows`; rows; or a function that makes them, given the model's chat format and how many
positions a sequence may have."""

DEFAULT_CONTEXT = 4096
"""Tokens of a row at most where the server does not say what its model takes."""

ROWS_FOR_ENDS = 8
"""Rows to train on whose answers are looked at for the tokens that end an answer."""


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What a run has done. `saved`: its last checkpoint. `interrupted`: Ctrl-C ended it before its last step; it can be
    resumed. `curve`: the lines of `metrics.jsonl`."""

    folder: Path
    model: str
    settings: TrainSettings
    steps: int
    saved: SavedStep
    interrupted: bool
    curve: list[dict[str, Any]] = field(repr=False)

    def first_and_last(self, name: str) -> tuple[float, float] | None:
        """Of a number in the curve, as "held_out_loss"; None if it was never measured."""
        values = [row[name] for row in self.curve if row.get(name) is not None]
        return (values[0], values[-1]) if values else None


def train(
    data: Data,
    *,
    model: str,
    out: str | Path,
    settings: TrainSettings | Mapping[str, Any] | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    service: tinker.ServiceClient | None = None,
    start_from: str | None = None,
    resume: bool = False,
    evaluation: Evaluation | None = None,
    objective: Callable[[Rows, TrainSettings, RunFolder], Objective] | None = None,
    trackers: Sequence[str | Tracker] = (),
    project: str = "tinker-local",
    renderer: Callable[[tinker.TrainingClient], Decodes] = Renderer.of,
    before: Callable[[Rows, Any], None] | None = None,
    say: Say = print,
) -> TrainReport:
    """Train an adapter of `model` on rows of data; returns after the last checkpoint is saved.

    Args:
        data: A file or folder as `read_rows` takes them, which must have no bad rows; or the rows; or a function that
            makes them of the chat format and the positions that a sequence may have, as `read_rows` with your rules.
        model: A base model that the server has.
        out: A new folder for the curve and the paths of checkpoints; with `resume` the folder of the run.
        settings: All of them, or some by name. The others are those of `guidance.advise`, which are printed.
        base_url: As of `ServiceClient`.
        api_key: As of `ServiceClient`.
        service: A client to use instead, for example one with a backend in this process; it is not closed.
        start_from: A checkpoint whose weights the run begins with, `tinker://RUN/weights/NAME`, for example one of SFT
            before DPO; its rank is the run's. By default a new adapter.
        resume: Go on from the last checkpoint of the run in `out`, with its settings.
        evaluation: Scores answers to held-out rows; `read_evaluation` makes one. The held-out loss is always measured.
        objective: Makes what the steps minimise; by default `Supervised`, or `Preferences` for pairs.
        trackers: "wandb", "tensorboard", "trackio", or trackers of yours.
        project: The name under which wandb and trackio list the run.
        renderer: Makes the chat format of the model that a client trains.
        before: Called with the rows and the chat format before the first step, for example to show a row.
        say: Prints a line.

    Raises InvalidRequestError before anything is trained if a setting, the folder or the data are wrong, DivergedError
    if the loss becomes NaN or infinite, and what the SDK raises. In the main thread the first Ctrl-C saves a checkpoint
    and returns; the second raises KeyboardInterrupt.
    """
    folder = RunFolder(Path(out))
    began, start = begun_in(folder, resume)
    asked = settings.as_json() if isinstance(settings, TrainSettings) else dict(settings or {})
    if began is not None:
        asked = check_unchanged(began.settings, asked, folder.path).as_json()
    with _session(service, base_url, api_key) as used:
        facts = facts_of(model, _config(used, model))
        if start is not None:
            client = _resumed(used, start)
        elif start_from is not None:
            client, asked = _started(used, model, start_from, asked)
        else:
            client = _new(used, model, asked, facts)
        chat = renderer(client)
        rows = _rows(data, chat, used, model)
        if began is not None and start is not None:
            folder.require_same(began, model, rows)
            say(f"{folder.path}: going on after step {start.step}, from {start.state}")
        chosen = TrainSettings(**asked) if began is not None else _advised(facts, rows, asked, say)
        trained_on, held_out = split_rows(len(rows), chosen.held_out, chosen.seed)
        if evaluation is not None and not len(held_out):
            raise InvalidRequestError("eval: answers to held-out rows are scored, and held_out is 0: there are none")
        plan = Plan(trained_on, chosen)
        if start is not None and start.step >= plan.total:
            raise InvalidRequestError(
                f"out: the run in {folder.path} has done all of its {plan.total} steps: {start.state}"
            )
        say(_counts(rows, plan, len(held_out)))
        if before is not None:
            before(rows, chat)
        loss = (objective or _objective)(rows, chosen, folder)
        step = 0 if start is None else start.step
        measured = [int(row) for row in held_out]
        with ExitStack() as opened:
            opened.enter_context(folder.held())
            record = began or folder.begin(model, rows, chosen)
            folder.forget_after(step)
            opened.enter_context(ServerWatch(getattr(getattr(used, "endpoint", None), "base_url", None), say))
            tracked = TrackedRun(project, record.name, folder.path, chosen.as_json(), None if start is None else step)
            shown = [_open(opened, each, tracked) for each in trackers]
            loss.prepare(client, [*map(int, plan.rows_used()), *measured], start is not None, say)
            asked_to_stop = opened.enter_context(Interrupts())
            loop = Loop(
                client,
                loss,
                plan,
                measured,
                folder,
                Answerer(
                    rows,
                    lambda tokens: str(chat.tokenizer.decode(tokens, skip_special_tokens=True)),
                    ends_of(rows, plan.rows_of(1)[:ROWS_FOR_ENDS]),
                ),
                evaluation=evaluation,
                trackers=shown,
                stopped=lambda: asked_to_stop.asked,
                say=say,
            )
            saved = loop.run(step)
        done = saved.step >= plan.total
        return TrainReport(folder.path, model, chosen, saved.step, saved, not done, folder.metrics())


def _advised(facts: ModelFacts, rows: Rows, asked: Mapping[str, Any], say: Say) -> TrainSettings:
    """Settings of a new run; what was not asked for is said with its reason."""
    trained = sum(trained for row in range(len(rows)) for _, trained in rows.lengths(row))
    advice = advise(facts, rows.kind, len(rows), asked, trained)
    for line in advice.lines():
        say(line)
    return advice.settings


def begun_in(folder: RunFolder, resume: bool) -> tuple[RunRecord | None, SavedStep | None]:
    """What `folder` has to resume, or nothing for a new run. InvalidRequestError if it has a run or lacks one."""
    if not resume:
        folder.require_new()
        return None, None
    record, saved = folder.read(), folder.last_saved()
    if saved is None:
        raise InvalidRequestError(
            f"out: the run in {folder.path} has no checkpoint to go on from; choose another folder"
        )
    return record, saved


@contextmanager
def _session(
    service: tinker.ServiceClient | None, base_url: str | None, api_key: str | None
) -> Iterator[tinker.ServiceClient]:
    """`service`, or one that ends with the context."""
    if service is not None:
        yield service
        return
    own = ServiceClient(base_url=base_url, api_key=api_key, display_name="train")
    status: Literal["success", "errored"] = "errored"
    try:
        yield own
        status = "success"
    finally:
        own.close(status).result()


def _rows(data: Data, chat: Any, service: tinker.ServiceClient, model: str) -> Rows:
    if isinstance(data, str | Path):
        return read_rows(data, renderer=chat, most_tokens=context_of(service, model))
    return data(chat, context_of(service, model)) if callable(data) else data


def context_of(service: tinker.ServiceClient, model: str) -> int:
    """The positions that the server lets a sequence of `model` have; `DEFAULT_CONTEXT` if it does not say."""
    models = _models_of(service)
    return next((each.max_context_length for each in models if each.model_name == model), None) or DEFAULT_CONTEXT


def _models_of(service: tinker.ServiceClient) -> Sequence[tinker.types.SupportedModel]:
    """The base models that the server has."""
    endpoint = getattr(service, "endpoint", None)
    rest = (
        tinker.RestClient()
        if endpoint is None
        else RestClient(base_url=endpoint.base_url, api_key=endpoint.api_key, check_server=False)
    )
    return rest.get_server_capabilities().result().supported_models


def _config(service: tinker.ServiceClient, model: str) -> Mapping[str, Any] | None:
    """The model's `config.json`, which a local server gives; None elsewhere."""
    endpoint = getattr(service, "endpoint", None)
    if endpoint is None:
        return None
    try:
        found = send(endpoint, "GET", "tokenizers/config.json", params={"base_model": model}, timeout=30).json()
    except (tinker.APIError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _new(
    service: tinker.ServiceClient, model: str, asked: Mapping[str, Any], facts: ModelFacts
) -> tinker.TrainingClient:
    """An adapter with first weights, made of the seed. InvalidRequestError if the server does not have the model."""
    rank, seed = asked.get("rank", rank_for(facts)[0]), asked.get("seed", 0)
    try:
        return service.create_lora_training_client(base_model=model, rank=rank, seed=seed).result()
    except (tinker.BadRequestError, tinker.NotFoundError) as error:
        endpoint = getattr(service, "endpoint", None)
        if endpoint is None:  # a backend in this process says it in its words
            raise
        served = [each.model_name for each in _models_of(service) if each.model_name]
        if model in served:
            raise
        raise InvalidRequestError(
            f"model: the server at {endpoint.base_url} has no {model}; it has {', '.join(served)}"
        ) from error


def _started(
    service: tinker.ServiceClient, model: str, path: str, asked: dict[str, Any]
) -> tuple[tinker.TrainingClient, dict[str, Any]]:
    """One with the weights of a checkpoint and a new optimizer, and `asked` with its rank. InvalidRequestError if the
    server does not have the checkpoint, or if it has another rank or base model than was asked for."""
    try:
        client = service.create_training_client_from_state(path).result()
    except tinker.NotFoundError as error:
        raise InvalidRequestError(f"start_from: the server does not have {path}: {error}") from None
    info = client.get_info()
    if info.model_name not in (None, model):
        raise InvalidRequestError(f"start_from: {path} is of {info.model_name}, not of {model}")
    rank = info.lora_rank
    if rank is not None and asked.get("rank", rank) != rank:
        raise InvalidRequestError(f"rank: {path} has rank {rank}, so it cannot be {asked['rank']}; leave it out")
    return client, asked if rank is None else {**asked, "rank": rank}


def _resumed(service: tinker.ServiceClient, start: SavedStep) -> tinker.TrainingClient:
    """The one of the run's checkpoint, with its optimizer. InvalidRequestError if that is gone."""
    try:
        return service.create_training_client_from_state_with_optimizer(start.state).result()
    except tinker.NotFoundError as error:
        raise InvalidRequestError(f"out: the server does not have {start.state}: {error}") from None


def _objective(rows: Rows, settings: TrainSettings, folder: RunFolder) -> Objective:
    if rows.kind == "preference":
        return Preferences(rows, settings.dpo_beta, folder.reference)
    return Supervised(rows)


def _open(opened: ExitStack, tracker: str | Tracker, run: TrackedRun) -> Tracker:
    found = open_tracker(tracker, run) if isinstance(tracker, str) else tracker
    opened.callback(found.close)
    return found


def _counts(rows: Rows, plan: Plan, held_out: int) -> str:
    """How much there is to train on, and how long an epoch is."""
    lengths = [length for row in map(int, plan.train) for length in rows.lengths(row)]
    tokens, trained = sum(length for length, _ in lengths), sum(trained for _, trained in lengths)
    what = "pairs" if rows.kind == "preference" else "rows"
    skipped = len({each.place for each in rows.skipped})
    return (
        f"{len(plan.train):,} {what} to train on, {held_out:,} held out{f', {skipped:,} skipped' if skipped else ''}; "
        f"{trained:,} of {tokens:,} tokens of an epoch are trained on; {plan.total:,} steps of "
        f"{plan.settings.batch_size} {what}, {plan.steps_per_epoch:,} an epoch"
    )
