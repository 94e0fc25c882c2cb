"""What importing the types loads."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "PIL", "tinker", "vllm")


@pytest.mark.parametrize("module", ["tinker_local.types", "tinker_local.types.codec", "tinker_local.types.sdk"])
def test_importing_the_types_loads_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_using_the_types_and_the_codec_loads_nothing_heavy() -> None:
    program = f"""
import sys
from tinker_local.types import Datum, ForwardBackwardRequest, ModelInput
from tinker_local.types.codec import decode_forward_backward_request, encode_forward_backward_request
datum = Datum(model_input=ModelInput.from_ints([1, 2]), loss_fn_inputs={{"weights": [1.0, 0.0]}})
request = ForwardBackwardRequest(model_id="m", seq_id=1, data=[datum], loss_fn="cross_entropy")
assert decode_forward_backward_request(encode_forward_backward_request(request)) == request
print(*[name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
