"""A request of few bytes asks for little: what would be far larger than its body is refused by its numbers."""

from typing import Any

import numpy as np
import pytest
from tinker_local.backend.control.training_commands import CELLS_PER_VALUE, FREE_CELLS, check_cells
from tinker_local.types import Datum, ModelInput, SamplingParams, TensorData

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


async def test_sparse_tensors_may_have_256_cells_for_each_value_beyond_a_million_on_fakes(api: Api) -> None:
    """A request of 400 bytes could ask for a gigabyte, several of each run at once."""
    model = await api.model()
    values = 64
    columns = (FREE_CELLS + values * CELLS_PER_VALUE) // 2
    fits, exceeds = datum(columns, values), datum(columns + 1, values)
    check_cells([fits])
    limit = FREE_CELLS + CELLS_PER_VALUE * values
    message = await api.failure(await api.gradient(model, 1, [exceeds]))
    assert f"data: sparse tensors of {values} values have {limit + 2} cells in all" in message
    assert message.startswith("user: ")
    assert message.endswith(f" {limit}; no gradient is left since the last optimizer step")
    assert await api.healthy()


@pytest.mark.parametrize(
    ("stop", "why", "fits"),
    [
        (["x" * 10] * 65, "65 stops are more than 64", ["x" * 10] * 64),
        (list(range(4097)), "4097 stops are more than 4096", list(range(4096))),
        ("x" * 4097, "4097 characters are more than 4096", "x" * 4096),
        (["x" * 3000, "y" * 1097], "4097 characters are more than 4096", ["x" * 3000, "y" * 1096]),
    ],
)
def test_stops_that_would_be_looked_for_after_every_token_are_bounded(stop: Any, why: str, fits: Any) -> None:
    with pytest.raises(ValueError, match=why):
        SamplingParams(stop=stop)
    SamplingParams(stop=fits)
