"""What a training run is asked for, in order of `seq_id`: gradients, optimizer steps, saves; and how each is queued."""

import logging
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import replace
from functools import cache, partial
from numbers import Real
from typing import Any

from tinker_local.backend.control.checkpoint_lifetime import check_ttl
from tinker_local.backend.control.exports import Exports
from tinker_local.backend.control.load_weights import LoadWeights
from tinker_local.backend.control.mismatch import (
    DrawnBy,
    Mismatch,
    SampledSpan,
    measure,
    request_metrics,
    sampled_spans,
    step_metrics,
)
from tinker_local.backend.control.recorded_routes import RecordedRoutes
from tinker_local.backend.control.recorded_samples import RecordedSamples
from tinker_local.backend.control.recorded_sessions import RecordedSessions
from tinker_local.backend.control.save_weights_for_sampler import SaveWeightsForSampler
from tinker_local.backend.control.sessions import check_user_metadata
from tinker_local.backend.control.training_runs import Command, TrainingRun, TrainingRuns
from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.scheduling.image_turns import MOST_RENDERED_BYTES, ImageTurns
from tinker_local.backend.scheduling.operations import Operation, OperationKind, Operations, Timeline, request_id_of
from tinker_local.backend.scheduling.quotas import Quotas
from tinker_local.backend.scheduling.run_queue import Bounds, GradientCommand, StepCommand, positions
from tinker_local.backend.scheduling.train_scheduler import to_output
from tinker_local.backend.storage.curves import Curves
from tinker_local.backend.storage.names import AUTOSAVE, check_checkpoint_name
from tinker_local.backend.storage.store import Store
from tinker_local.backend.threads import ACTING, DISK, ENCODING, IMAGE_THREADS, PREPARING, PREPARING_IMAGES, Who
from tinker_local.backend.training.losses import loss_of
from tinker_local.backend.training.losses.loss import Loss, make_train_datum
from tinker_local.backend.training.losses.recorded import FindRecord, RecordedSequence
from tinker_local.backend.training.optimizers import step_settings
from tinker_local.backend.training.routes import Routes
from tinker_local.backend.training.trainer import TrainDatum, TrainResult, TrainWork
from tinker_local.types import (
    ApiError,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ImageChunk,
    InvalidRequestError,
    LoadWeightsRequest,
    OptimStepOutput,
    OptimStepRequest,
    ProvenanceSpan,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    TooManyRequestsError,
    UnsupportedError,
)

log = logging.getLogger(__name__)

FindDrawn = Callable[[str, str], DrawnBy]
"""The weights that drew a sequence, by the session and the sequence's id."""
FindRoutes = Callable[[Sequence[ProvenanceSpan] | None, RenderedInput], Routes | None]
"""The recorded experts of the positions of an input, which spans tile; None if nothing is recorded of any."""

Steps = Generator[bool | None, None, TrainWork]
"""The steps to a prepared request. Each yields whether the next one renders images."""


class Training:
    """Queues the commands of live training runs. The same (run, `seq_id`) again is the same operation.

    A submit is never refused for good: the SDK's training client would hang if one of several chunks were.
    """

    def __init__(
        self,
        quotas: Quotas,
        store: Store,
        runs: TrainingRuns,
        operations: Operations,
        loads: LoadWeights,
        saves_for_sampler: SaveWeightsForSampler,
        exports: Exports,
        curves: Curves,
        recorded: RecordedSamples,
        kept: RecordedSessions,
        drawn_by: FindDrawn,
        routes: RecordedRoutes,
        *,
        strict_losses: bool,
    ) -> None:
        self._store = store
        self._runs = runs
        self._operations = operations
        self._loads = loads
        self._saves_for_sampler = saves_for_sampler
        self._exports = exports
        self._curves = curves
        self._recorded = recorded
        self._kept = kept
        self._drawn_by = drawn_by
        self._routes = routes
        self._strict_losses = strict_losses
        self._image_turns = ImageTurns(IMAGE_THREADS)
        self._bounds = Bounds(quotas)

    async def forward_backward(self, request: ForwardBackwardRequest) -> Operation[ForwardBackwardOutput]:
        """Logprobs, loss and (unless `forward_only`) the gradient, which is added to that of earlier calls.

        This and every other command raises TooManyRequestsError if as much is queued as the options allow: send it
        again, with the same `seq_id`, after its `retry_after` seconds.
        """
        return await self.forward_backward_encoded(
            request.model_id,
            request.seq_id,
            forward_only=request.forward_only,
            size=bytes_of(request),
            decoding=_decoded(request),
        )

    async def forward_backward_encoded(
        self,
        model_id: str,
        seq_id: int,
        *,
        forward_only: bool,
        size: int,
        decoding: Generator[None, None, ForwardBackwardRequest],
        began: float | None = None,
    ) -> Operation[ForwardBackwardOutput]:
        """`forward_backward` of a request of `size` bytes that `decoding` unpacks in a thread, step by step. Invalid
        data fails the operation. `began`: when it began to arrive, of the event loop's clock."""
        kind: OperationKind = "forward" if forward_only else "forward_backward"
        operation: Operation[ForwardBackwardOutput] = Operation(request_id_of(model_id, seq_id), kind)
        model = await self._place(operation, model_id, seq_id, size)
        if isinstance(model, Operation):
            return model
        base = model.base

        def find_record(sequence_id: str) -> RecordedSequence:
            kept = self._kept.sequence(model.owner, sequence_id)
            return self._recorded.find(model.record.session_id, sequence_id) if kept is None else kept

        find_routes: FindRoutes | None = None
        if base.routed is not None:
            find_routes = partial(self._routes.routes, model.record.session_id, base.path, base.routed)
        spans: list[list[SampledSpan] | None] = []
        noted = noting_spans(decoding, partial(self._drawn_by, model.record.session_id), spans)
        work_steps = prepare_work(base, model_id, noted, find_record, find_routes, strict_losses=self._strict_losses)
        steps, total_weight = in_stage(operation.timeline, work_steps), 0.0

        async def prepare() -> TrainWork:
            nonlocal total_weight
            work = await self._prepared(model.owner, model.record.session_id, steps)
            images = sum(len(datum.input.images) for datum in work.data)
            loss = loss_of(work.loss_fn)
            if loss.own_definition and loss.name not in model.told_losses:
                model.told_losses.add(loss.name)
                log.warning("run %s: %s is trained by %s (docs/losses.md)", model_id, loss.name, loss.source)
            total_weight = sum(loss.total_weight(datum.loss_inputs) for datum in work.data)
            operation.timeline.note(datums=len(work.data), tokens=positions(work.data), images=images)
            return work

        def ran(work: TrainWork, result: TrainResult, positions: int) -> Awaitable[ForwardBackwardOutput] | None:
            if work.backward:
                model.progress.tokens += positions
                model.progress.total_weight += total_weight
                loss = result.metrics.get("loss:sum")
                # One that is not a number fails when the result is delivered; here it would stop the scheduler.
                model.progress.loss_sum += loss if isinstance(loss, Real) else math.nan
            used = loss_of(work.loss_fn)
            if not used.reads_sampler:
                return None
            staleness, vocab_size = model.staleness(), base.engines.trainer.vocab_size
            of_step: list[Mismatch] = model.progress.measured if work.backward else []
            of_step.append({})
            at = len(of_step) - 1

            def encode() -> ForwardBackwardOutput:
                of_step[at] = found = measure(used, work.data, result, spans, staleness, vocab_size)
                return to_output(result, request_metrics(found))

            encoded = ENCODING.run(encode)  # with the measurement: a second change of threads would cost as much
            if work.backward:
                model.progress.measuring(encoded)
            return encoded

        command = GradientCommand(operation, prepare, size, ran=ran, began=began)
        if (reason := self._bounds.too_large(model.queue, seq_id, size)) is not None:
            command = GradientCommand(operation, partial(_fail, InvalidRequestError(f"data: {reason}")), began=began)
        base.scheduler.submit(model.queue, seq_id, command)
        return operation

    async def _prepared(self, owner: str, session_id: str, steps: Steps) -> TrainWork:
        """What `steps` return, in a thread. Every request has it for one slice at a time, so that a small one waits
        for slices of the others; text never waits for images. Cancelling it ends it after the slice."""
        ACTING.set(Who(owner, session_id))  # in the task of this preparation, which some other request may have begun
        spent, images = 0.0, False
        while True:
            if images:
                async with self._image_turns.turn(owner, session_id):
                    work, took, images = await PREPARING_IMAGES.run(run_slice, steps, images)
            else:
                work, took, images = await PREPARING.run(run_slice, steps, images)
            spent += took
            if work is not None:
                return work
            if spent > MAX_PREPARATION_SECONDS:
                raise InvalidRequestError(
                    f"data: decoding and rendering took more than {MAX_PREPARATION_SECONDS:g} s; send fewer datums at "
                    "once"
                )

    async def optim_step(self, request: OptimStepRequest) -> Operation[OptimStepOutput]:
        """One update with the accumulated gradient, which is cleared. It fails, and discards the gradient, if a
        forward_backward since the last step failed, unless another one was sent after that had been read; and if it
        would leave what is not finite."""

        async def run(model: TrainingRun, operation: Operation[OptimStepOutput]) -> None:
            trainer, scheduler = model.base.engines.trainer, model.base.scheduler
            params = step_settings(request, model.optimizer)
            if (reason := model.queue.commands.take_poisoned()) is not None:
                await scheduler.call(trainer.discard_gradients, model.model_id)
                model.queue.forget_gradient()
                raise InvalidRequestError(
                    f"the optimizer step was not taken and the gradient was discarded, because {reason}"
                )
            try:
                metrics = await scheduler.call(trainer.optim_step, model.model_id, params)
            except InvalidRequestError:
                model.queue.forget_gradient()
                raise
            model.stepped()
            mismatch = await model.progress.mismatch()
            rate = getattr(params, "learning_rate", None)
            point = model.progress.stepped(model.steps, rate, metrics, mismatch)
            self._curves.add_step(model.model_id, point.line())
            model.queue.forget_gradient()
            model.base.counts.optimizer_steps += 1
            if (notice := model.progress.notice(mismatch)) is not None:
                log.warning("run %s: %s", model.model_id, notice)
            operation.succeed(OptimStepOutput(metrics={**metrics, **step_metrics(mismatch)}))

        return await self._in_order("optim_step", request.model_id, request.seq_id, run)

    async def save_weights(self, request: SaveWeightsRequest) -> Operation[dict[str, Any]]:
        """Queue a checkpoint of weights and optimizer; the copy is taken in order, the disk is written beside."""

        async def run(model: TrainingRun, operation: Operation[dict[str, Any]]) -> None:
            name = check_checkpoint_name(request.path, "path")
            if name == AUTOSAVE:
                raise InvalidRequestError(f"path: {AUTOSAVE!r} is the name of what the server saves by itself")
            check_ttl(request.ttl_seconds)
            check_user_metadata(request.user_metadata)
            state = await model.base.scheduler.call(model.base.engines.trainer.capture, model.model_id, optimizer=True)
            record, steps = model.checkpoint("weights", name, request.ttl_seconds, request.user_metadata), model.steps

            async def write() -> None:
                written = await DISK.run(self._store.write_checkpoint, record, state, overwrite=request.overwrite)
                model.saved(written, steps)
                operation.succeed({"path": written.tinker_path})

            model.beside(operation, write())

        return await self._in_order("save_weights", request.model_id, request.seq_id, run)

    async def load_weights(self, request: LoadWeightsRequest) -> Operation[dict[str, Any]]:
        """A checkpoint into a new run (`session_id`, `model_seq_id`) or an existing one (`model_id`, `seq_id`): result
        `{"path", "model_id"}`."""
        new = request.session_id is not None and request.model_seq_id is not None
        if new == (request.model_id is not None and request.seq_id is not None):
            raise InvalidRequestError("load_weights: give session_id and model_seq_id, or model_id and seq_id")
        if request.model_id is None or request.seq_id is None:
            return await self._loads.into_new(request)
        return await self._in_order(
            "load_weights", request.model_id, request.seq_id, self._loads.into_existing(request)
        )

    async def save_weights_for_sampler(self, request: SaveWeightsForSamplerRequest) -> Operation[dict[str, Any]]:
        """An immutable version to sample from: result `{"path"}` if named, else `{"sampling_session_id"}`."""
        save = self._saves_for_sampler.save(request)
        return await self._in_order("save_weights_for_sampler", request.model_id, request.seq_id, save)

    async def save_weights_external(self, request: SaveWeightsExternalRequest) -> Operation[dict[str, Any]]:
        """A PEFT folder to download: result `{"path", "size_bytes"}`; `Exports.sign` gives the URLs of its files."""
        return await self._in_order(
            "save_weights_external", request.model_id, request.seq_id, self._exports.save(request)
        )

    async def refuse(self, kind: OperationKind, model_id: str, seq_id: int, error: ApiError) -> Operation[Any]:
        """Let a malformed command fail in its place with `error`, so that the run continues."""

        async def run(model: TrainingRun, operation: Operation[Any]) -> None:
            raise error

        return await self._in_order(kind, model_id, seq_id, run)

    async def _in_order(self, kind: OperationKind, model_id: str, seq_id: int, run: Command) -> Operation[Any]:
        """Queue `run` at `seq_id` of the training run."""
        operation: Operation[Any] = Operation(request_id_of(model_id, seq_id), kind)
        model = await self._place(operation, model_id, seq_id)
        if isinstance(model, Operation):
            return model
        model.base.scheduler.submit(model.queue, seq_id, StepCommand(operation, partial(run, model, operation)))
        return operation

    async def _place(
        self, operation: Operation[Any], model_id: str, seq_id: int, size: int = 0
    ) -> TrainingRun | Operation[Any]:
        """The run that a new operation of `size` bytes goes to; or the operation of that id, if it exists already or
        has just failed."""
        if (known := self._operations.repeated(operation.request_id, operation.kind)) is not None:
            return known
        model = self._runs.live(model_id)
        if model is None:
            error = await self._runs.lost_model(model_id)
            if (known := self._operations.repeated(operation.request_id, operation.kind)) is not None:
                return known
            self._operations.add(operation)
            operation.fail(error)
            return operation
        accepted = model.queue.commands.accepts(seq_id)
        if accepted:
            self._check_bounds(model, seq_id, size)
        operation.owner, operation.failures = model.owner, model.base.counts.failures
        self._operations.add(operation)
        if not accepted:
            operation.fail(
                InvalidRequestError(
                    f"seq_id: {seq_id} arrived after the model went on to {model.queue.commands.next_seq_id} without it"
                )
            )
            return operation
        self._runs.touch(model)
        return model

    def _check_bounds(self, model: TrainingRun, seq_id: int, size: int) -> None:
        """TooManyRequestsError if the queue is full."""
        try:
            self._bounds.check(model.queue, [live.queue for live in self._runs.all_live()], seq_id, size)
        except TooManyRequestsError:
            model.base.counts.submits_refused += 1
            raise


async def _fail(error: ApiError) -> TrainWork:
    """The preparation of a request that can never run."""
    raise error


MAX_CELLS = 2**26
"""Of all tensors of one request when dense: a few bytes of CSR could otherwise demand any amount of memory."""

FREE_CELLS, CELLS_PER_VALUE = 2**20, 256
"""The tensors of a request may have so many cells when dense, and this many more for each value that was sent."""


SLICE_SECONDS = 0.01
"""For which a request is prepared before the next one has its turn. One datum is never divided."""

MAX_PREPARATION_SECONDS = 120.0
"""Of a thread, for one request."""


def run_slice(steps: Steps, images: bool) -> tuple[TrainWork | None, float, bool]:
    """Go on for a slice of steps that render images, or of steps that do not: what they return if they have ended, the
    seconds that it took, and whether the next step renders images."""
    start = time.perf_counter()
    try:
        while True:
            next_images = bool(next(steps))
            took = time.perf_counter() - start
            if took >= SLICE_SECONDS or next_images != images:
                return None, took, next_images
    except StopIteration as end:
        return end.value, time.perf_counter() - start, False


def in_stage(timeline: Timeline, steps: Steps) -> Steps:
    """`steps`; the operation is in `preparing` from the first to the last, and waits afterwards."""
    timeline.enter("preparing")
    try:
        work = yield from steps
    except Exception:
        timeline.enter("waiting")
        raise
    timeline.enter("waiting")
    return work


def _decoded(request: ForwardBackwardRequest) -> Generator[None, None, ForwardBackwardRequest]:
    """The steps to a request that needs no decoding."""
    yield
    return request


def noting_spans(
    decoding: Generator[None, None, ForwardBackwardRequest],
    drawn_by: Callable[[str], DrawnBy],
    found: list[list[SampledSpan] | None],
) -> Generator[None, None, ForwardBackwardRequest]:
    """The steps of `decoding`; then `found` has the sampled spans of each datum. None: it has no spans."""
    request = yield from decoding
    known = cache(drawn_by)
    for datum in request.data:
        if datum.loss_fn_input_spans is None:
            found.append(None)
            continue
        yield
        found.append(sampled_spans(datum.loss_fn_input_spans, known))
    return request


def prepare_work(
    base: ServedModel,
    model_id: str,
    decoding: Generator[None, None, ForwardBackwardRequest],
    find_record: FindRecord,
    find_routes: FindRoutes | None = None,
    *,
    strict_losses: bool,
) -> Steps:
    """Decode, render and check one request, a datum in each step; InvalidRequestError names the datum and the field."""
    request = yield from decoding
    if not request.data:
        raise InvalidRequestError("data: at least one datum is needed")
    loss = loss_of(request.loss_fn)
    if loss.own_definition and strict_losses:
        raise UnsupportedError(
            f"loss_fn: {loss.name!r} is refused by this server (--strict-losses), because its objective on the hosted "
            "service is not public; the nearest is 'importance_sampling'"
        )
    config = loss.complete_settings(request.loss_fn_config)
    check_cells(request.data)
    data: list[TrainDatum] = []
    size, images = 0, set[int]()
    for index, datum in enumerate(request.data):
        yield any(isinstance(chunk, ImageChunk) for chunk in datum.model_input.chunks)
        data.append(prepare_datum(base, datum, loss, f"data[{index}]", find_record, find_routes))
        for placed in data[-1].input.images:
            size += 0 if id(placed.image) in images else placed.image.num_bytes
            images.add(id(placed.image))
        if size > MOST_RENDERED_BYTES // 2:
            raise InvalidRequestError(
                f"data[{index}].model_input: with it the images of the request take {size} bytes when rendered, the "
                f"limit is {MOST_RENDERED_BYTES // 2}; send fewer datums at once"
            )
    return TrainWork(model_id, data, request.loss_fn, config, backward=not request.forward_only)


def check_cells(data: Sequence[Datum]) -> None:
    """InvalidRequestError if the tensors of `data` would have more than `MAX_CELLS` cells when dense, or many more
    than the values that were sent."""
    cells = values = 0
    for i, datum in enumerate(data):
        for name, tensor in datum.loss_fn_inputs.items():
            cells += math.prod(tensor.dense_shape)
            if cells > MAX_CELLS:
                raise InvalidRequestError(
                    f"data[{i}].loss_fn_inputs.{name}: shape {list(tensor.dense_shape)} brings the request to {cells} "
                    f"cells, the limit is {MAX_CELLS}; send fewer datums at once"
                )
            values += tensor.data.size
    if cells > (limit := FREE_CELLS + CELLS_PER_VALUE * values):
        raise InvalidRequestError(
            f"data: sparse tensors of {values} values have {cells} cells in all, the limit for so few values is {limit}"
        )


def prepare_datum(
    base: ServedModel,
    datum: Datum,
    loss: Loss,
    where: str,
    find_record: FindRecord | None = None,
    find_routes: FindRoutes | None = None,
) -> TrainDatum:
    """One datum rendered and checked."""
    rendered = base.engines.renderer.render(datum.model_input, f"{where}.model_input")
    if rendered.length > base.max_context_length:
        raise InvalidRequestError(
            f"{where}.model_input: {rendered.length} positions exceed the context length of {base.max_context_length}"
        )
    made = make_train_datum(datum, rendered, loss, base.engines.trainer.vocab_size, where, find_record)
    routes = None if find_routes is None else find_routes(datum.model_input_spans, rendered)
    return made if routes is None else replace(made, routes=routes)


def bytes_of(request: ForwardBackwardRequest) -> int:
    """Bytes of the tokens, images and tensors of a request."""
    size = 0
    for datum in request.data:
        for chunk in datum.model_input.chunks:
            if isinstance(chunk, EncodedTextChunk):
                size += chunk.tokens.nbytes
            elif isinstance(chunk, ImageChunk):
                size += len(chunk.data)
        for tensor in datum.loss_fn_inputs.values():
            arrays = (tensor.data, tensor.sparse_crow_indices, tensor.sparse_col_indices)
            size += sum(array.nbytes for array in arrays if array is not None)
    return size
