"""Which optimizers there are, and which settings a step may come with."""

from tinker_local.types import AdamParams, InvalidRequestError, OptimizerConfig, OptimStepRequest, UnsupportedError

ADAMW = "adamw"

_WHY = {"dimuon": " (its update rule is not public)"}
"""What is to be said of an optimizer of the SDK that is not here."""


def check_optimizer(config: OptimizerConfig) -> None:
    """UnsupportedError for anything but AdamW."""
    if config.type != ADAMW:
        raise UnsupportedError(
            f"optimizer_config.type: {config.type!r} is not supported by this server{_WHY.get(config.type, '')}; "
            f"leave it out, which means {ADAMW!r}, and step with AdamParams"
        )
    if config.version is not None:
        raise UnsupportedError(
            f"optimizer_config.version: {config.version} is not supported; {ADAMW!r} has no versions"
        )


def step_params(request: OptimStepRequest) -> AdamParams:
    """How the step is to be taken; InvalidRequestError if that is not said, or for another optimizer."""
    if request.optimizer_params is not None:
        family = request.optimizer_params.get("type")
        raise InvalidRequestError(
            f"optimizer_params.type: {family!r} is not the model's optimizer, which is {ADAMW!r}; "
            "send adam_params (AdamParams) alone"
        )
    if request.adam_params is None:
        raise InvalidRequestError("adam_params: missing; every step says how it is to be taken")
    return request.adam_params
