"""A request of few bytes asks for little: what would be far larger than its body is refused by its numbers."""

from typing import Any

import numpy as np
import pytest
from tinker_local.types import Datum, ForwardBackwardRequest, ModelInput, SamplingParams, TensorData
from tinker_local.types.codec import encode_forward_backward_request
from tinker_local.types.datum import CELLS_PER_VALUE, FREE_SPARSE_CELLS

from tests.http.conftest import Api


def sparse(rows: int, columns: int, values: int = 1) -> TensorData:
    """`values` cells of the first row."""
    return TensorData(
        data=np.ones(values, np.int64),
        dtype="int64",
        shape=(rows, columns),
        sparse_crow_indices=np.array([0] + [values] * rows),
        sparse_col_indices=np.arange(values),
    )


def datum(columns: int, values: int = 1) -> Datum:
    return Datum(model_input=ModelInput.from_ints([5, 9]), loss_fn_inputs={"target_tokens": sparse(2, columns, values)})


def body(**changes: Any) -> bytes:
    """A request of one sparse datum that is as large as it may be, as bytes that were not checked here."""
    request = ForwardBackwardRequest(model_id="m", seq_id=1, data=(datum(2),), loss_fn="cross_entropy")
    return encode_forward_backward_request(request.model_copy(update=changes))


async def test_sparse_tensors_of_a_few_bytes_are_refused_before_they_are_dense_on_fakes(api: Api) -> None:
    """1,620 bytes, twenty matrices of 2**26 cells: the server was killed for want of memory."""
    model = await api.model()
    sent = body(model_id=model, data=(datum(2**25),) * 20)
    assert len(sent) < 2500
    answer = await api.send_gradient(sent)
    message = await api.failure(answer.json()["request_id"])
    cells = 20 * 2**26
    assert message.startswith(f"user: data: the sparse tensors have {cells} cells in all and list 20 values")
    assert str(FREE_SPARSE_CELLS + 20 * CELLS_PER_VALUE) in message
    assert await api.healthy()


@pytest.mark.mutation(
    "sparse-tensors-out-of-proportion",
    "requests_and_results.py",
    "        if cells > limit:\n",
    "        if False:\n",
)
def test_sparse_tensors_may_have_256_cells_for_each_value_beyond_a_million() -> None:
    values = 4096
    columns = (FREE_SPARSE_CELLS + values * CELLS_PER_VALUE) // 2
    request = {"model_id": "m", "seq_id": 1, "loss_fn": "cross_entropy"}
    ForwardBackwardRequest(**request, data=(datum(columns, values),))
    with pytest.raises(ValueError, match="the limit for so few values"):
        ForwardBackwardRequest(**request, data=(datum(columns + 1, values),))


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        (["x" * 10] * 65, "65 stops are more than 64"),
        (list(range(65)), "65 stops are more than 64"),
        ("x" * 4097, "4097 characters are more than 4096"),
        (["x" * 3000, "y" * 1097], "4097 characters are more than 4096"),
    ],
)
def test_stops_that_would_be_looked_for_after_every_token_are_bounded(stop: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        SamplingParams(stop=stop)
    SamplingParams(stop=stop[:64] if isinstance(stop, list) and len(stop) > 64 else "x" * 4096)
