"""The wire format: protobuf bytes from and to our types.

Decoding makes no Python lists: an array is a read-only numpy view of the bytes that protobuf hands out (only int32 and
bfloat16 tensors are widened into new memory). A `forward_backward` body is decoded in two stages, because a server
accepts every request that it can put in order and reports what is wrong with its data through the future:
`parse_forward_backward_envelope` fails only if there is no model and no place in its order; `envelope.decode()` fails
with an InvalidRequestError that names the field, e.g. `data[3].loss_fn_inputs['weights']`.

A field that the schema does not know is refused, never dropped.
"""

from tinker_local.types.codec.forward_backward import ForwardBackwardEnvelope as ForwardBackwardEnvelope
from tinker_local.types.codec.forward_backward import (
    decode_forward_backward_output as decode_forward_backward_output,
)
from tinker_local.types.codec.forward_backward import (
    decode_forward_backward_request as decode_forward_backward_request,
)
from tinker_local.types.codec.forward_backward import (
    encode_forward_backward_output as encode_forward_backward_output,
)
from tinker_local.types.codec.forward_backward import (
    encode_forward_backward_request as encode_forward_backward_request,
)
from tinker_local.types.codec.forward_backward import (
    parse_forward_backward_envelope as parse_forward_backward_envelope,
)
from tinker_local.types.codec.sample_output import decode_sample_output as decode_sample_output
from tinker_local.types.codec.sample_output import encode_sample_output as encode_sample_output
