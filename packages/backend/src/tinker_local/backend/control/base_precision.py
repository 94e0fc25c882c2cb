"""An adapter and a base in other bits than those on which it was trained: what is refused, and what is said.

An adapter makes up for the rounding of the base that it learnt on, so that on another it is another model. The state of
an optimizer is of gradients there. A run does not go on with it; weights alone may be loaded and sampled, and the log
says so.
"""

from collections.abc import Mapping

from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.storage.records import BEGAN_ON, ELSEWHERE, CheckpointRecord
from tinker_local.backend.weights.precision import DENSE, EVEN, base_in, option_of, parts_of
from tinker_local.types import InvalidRequestError


def refuse_other_precision(record: CheckpointRecord, base: ServedModel) -> None:
    """InvalidRequestError unless the state of an optimizer in `record` is of gradients on `base` as it is here."""
    if (notice := other_precision(record, base)) is not None:
        raise InvalidRequestError(
            f"path: {notice}, to whose gradients the state of its optimizer does not belong: serve the model "
            f"{_served(record.base_precision, base.engines.base_precision)}, "
            "or load the weights alone, which begin with a fresh optimizer (create_training_client_from_state)"
        )


def _served(wanted: str | None, have: str | None) -> str:
    """How a base in `wanted` is served, in words, where one in `have` is."""
    (layers, head), (layers_here, head_here) = parts_of(wanted), parts_of(have)
    if (precision := option_of(layers)) is not None:
        of_layers = f"with --base-precision {precision}"
    elif layers == EVEN:
        of_layers = f"with --base-precision {EVEN} of the version that made it"
    elif layers is not None:
        of_layers = f"from the files in {layers}{', without --base-precision' if option_of(layers_here) else ''}"
    elif layers_here is None:
        of_layers = ""
    elif option_of(layers_here) is not None:
        of_layers = "without --base-precision"
    else:
        of_layers = "from files that are not quantized"
    of_head = f"with --head-precision {head}" if head else "without --head-precision" if head_here else ""
    return " and ".join(filter(None, (of_layers, of_head)))


def other_precision(record: CheckpointRecord, base: ServedModel) -> str | None:
    """That `record` was trained on a base in other bits than `base` has, in words; None if it was not."""
    have, want = base.engines.base_precision, record.base_precision
    if have == want:
        return None
    unsure = "" if want else ", or by a server that did not record it"
    return f"{record.tinker_path} was trained on {base_in(want)}{unsure}, and this server has {base_in(have)}"


def began_on(record: CheckpointRecord, base: ServedModel) -> str | None:
    """In what the base was on which the first weights of a run were trained that loads `record`; None if they were
    trained as it is."""
    earlier = record.user_metadata.get(BEGAN_ON)
    if record.base_precision != base.engines.base_precision:
        return str(earlier or record.base_precision or DENSE)
    return None if earlier is None else str(earlier)


def began_elsewhere(base: ServedModel) -> str | None:
    """The same of an adapter that is imported; None where the base is dense."""
    return None if base.engines.base_precision is None else ELSEWHERE


def began_metadata(precision: str | None) -> Mapping[str, str]:
    """The entry of `user_metadata` that says it, if it is another."""
    return {} if precision is None else {BEGAN_ON: precision}


def note_of_import(base: ServedModel) -> tuple[str, ...]:
    """What to know of an adapter that was trained elsewhere, if the base here is not dense."""
    precision = base.engines.base_precision
    return () if precision is None else (f"it was trained elsewhere, and this server has {base_in(precision)}",)
