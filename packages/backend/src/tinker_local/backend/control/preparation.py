"""From a request's bytes to what the trainer takes: decoded, rendered, checked. Runs in worker threads."""

import math
from collections.abc import Callable, Sequence

from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.training.interface import TrainDatum, TrainWork
from tinker_local.backend.training.losses import loss_of
from tinker_local.backend.training.losses.loss_inputs import make_train_datum
from tinker_local.types import Datum, EncodedTextChunk, ForwardBackwardRequest, ImageChunk, InvalidRequestError

MAX_CELLS = 2**26
"""Of all tensors of one request as they are once they are dense: a few bytes of CSR could ask for any memory."""


def prepare_work(base: ServedModel, model_id: str, decode: Callable[[], ForwardBackwardRequest]) -> TrainWork:
    """Decode, render and check one request; InvalidRequestError names the datum and the field."""
    request = decode()
    if not request.data:
        raise InvalidRequestError("data: at least one datum is needed")
    config = loss_of(request.loss_fn).complete_settings(request.loss_fn_config)
    check_cells(request.data)
    data = [prepare_datum(base, datum, request.loss_fn, f"data[{i}]") for i, datum in enumerate(request.data)]
    return TrainWork(model_id, data, request.loss_fn, config, backward=not request.forward_only)


def check_cells(data: Sequence[Datum]) -> None:
    """InvalidRequestError if the dense tensors of `data` would have more than `MAX_CELLS` cells in all."""
    cells = 0
    for i, datum in enumerate(data):
        for name, tensor in datum.loss_fn_inputs.items():
            cells += math.prod(tensor.dense_shape)
            if cells > MAX_CELLS:
                raise InvalidRequestError(
                    f"data[{i}].loss_fn_inputs.{name}: shape {list(tensor.dense_shape)} brings the request to {cells} "
                    f"cells, the limit is {MAX_CELLS}; send fewer datums at once"
                )


def prepare_datum(base: ServedModel, datum: Datum, loss_fn: str, where: str) -> TrainDatum:
    """One datum rendered and checked."""
    rendered = base.engines.renderer.render(datum.model_input, f"{where}.model_input")
    if rendered.length > base.max_context_length:
        raise InvalidRequestError(
            f"{where}.model_input: {rendered.length} positions exceed the context length of {base.max_context_length}"
        )
    return make_train_datum(datum, rendered, loss_fn, base.engines.trainer.vocab_size, where)


def bytes_of(request: ForwardBackwardRequest) -> int:
    """Of the tokens, images and tensors of a request, as they are held."""
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
