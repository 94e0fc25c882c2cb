"""The optimizers that exist, by their `type`. One module each."""

from tinker_local.backend.training.optimizers.adamw import ADAMW
from tinker_local.backend.training.optimizers.optimizer import Optimizer
from tinker_local.types import AdamParams, InvalidRequestError, OptimizerConfig, OptimStepRequest, UnsupportedError
from tinker_local.types.base import Frozen, errors_named

OPTIMIZERS: dict[str, Optimizer] = {optimizer.name: optimizer for optimizer in (ADAMW,)}

_WHY = {"dimuon": " (its update rule is not public)"}
"""Why an SDK optimizer is unsupported."""


def optimizer_of(config: OptimizerConfig) -> Optimizer:
    """The optimizer that a client chose; UnsupportedError for one that is not here, or for a version of it."""
    if config.type not in OPTIMIZERS:
        raise UnsupportedError(
            f"optimizer_config.type: {config.type!r} is not supported by this server{_WHY.get(config.type, '')}; "
            f"leave it out, which means {ADAMW.name!r}, and step with AdamParams"
        )
    if config.version is not None:
        raise UnsupportedError(
            f"optimizer_config.version: {config.version} is not supported; {config.type!r} has no versions"
        )
    return OPTIMIZERS[config.type]


def step_settings(request: OptimStepRequest, optimizer: Optimizer) -> Frozen:
    """The settings of a step by `optimizer`; InvalidRequestError if they are missing or another optimizer's."""
    family = None if request.optimizer_params is None else request.optimizer_params.get("type")
    if optimizer.settings is AdamParams:
        if request.optimizer_params is not None:
            raise InvalidRequestError(
                f"optimizer_params.type: {family!r} is not the model's optimizer, which is {optimizer.name!r}; "
                "send adam_params (AdamParams) alone"
            )
        if request.adam_params is None:
            raise InvalidRequestError("adam_params: missing; every step needs its settings")
        return request.adam_params
    if request.optimizer_params is None or request.adam_params is not None or family != optimizer.name:
        raise InvalidRequestError(
            f"optimizer_params: the model's optimizer is {optimizer.name!r}; send optimizer_params of this type alone"
        )
    with errors_named("optimizer_params"):
        return optimizer.settings.model_validate(
            {name: value for name, value in request.optimizer_params.items() if name != "type"}
        )
