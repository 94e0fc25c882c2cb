"""What dynamo keeps of the models that it compiled, to be let go of with them."""

import sys
from typing import Any


def kept_by_dynamo() -> set[tuple[str, Any]]:
    """What dynamo keeps for good, and with it the weights of models that were compiled: names in vLLM's modules of what
    it compiled, and keys of its hooks."""
    hooks = getattr(sys.modules.get("torch._dynamo.convert_frame"), "_bytecode_hooks", {})
    return {("", key) for key in hooks} | {
        (module, name)
        for module in [name for name in sys.modules if name.startswith("vllm.model_executor.models.")]
        for name in [name for name in vars(sys.modules[module]) if name.startswith("__compiled_fn_")]
    }


def let_dynamo_forget(kept: set[tuple[str, Any]]) -> None:
    for module, key in kept:
        if module:
            setattr(sys.modules[module], key, None)  # dynamo may still delete it
        else:
            sys.modules["torch._dynamo.convert_frame"]._bytecode_hooks.pop(key, None)
