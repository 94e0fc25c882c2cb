"""`BaseModel`: the files and modules of the model that an adapter was trained on, without its weights in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinker_local.backend.families import family_of
from tinker_local.backend.families.family import Family
from tinker_local.backend.weights.joined_names import EXPERTS_GATE_UP
from tinker_local.backend.weights.precision import Bits, group_of
from tinker_local.backend.weights.published import Published, forget_quantization, published_of
from tinker_local.types import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from tinker_local.backend.training.lora.lora import Target


@dataclass(frozen=True)
class BaseModel:
    """`path`: a folder (absolute) or hub name, which transformers, PEFT and vLLM resolve. `folder`: its files."""

    path: str
    folder: Path
    config: Any
    family: Family

    @cached_property
    def model(self) -> Any:
        """transformers' model, without values: its tensors are on the meta device."""
        import torch
        import transformers

        with torch.device("meta"):
            return getattr(transformers, self.family.auto_class).from_config(self.config)

    @cached_property
    def published(self) -> Published | None:
        """How its files have its layers in fewer bits, if they have."""
        return published_of(self.path)

    @property
    def precision(self) -> str | None:
        """What records call it, if its files have fewer bits."""
        return None if self.published is None else self.published.word

    @property
    def tied_head(self) -> bool:
        """Whether the LM head shares the embedding's matrix."""
        return bool(self.model.lm_head.weight is self.model.get_input_embeddings().weight)

    @property
    def dtype(self) -> str:
        """What the check computes in: float32 for a model in float32, else bfloat16."""
        import torch

        return "float32" if self.config.dtype in (None, torch.float32, torch.float64) else "bfloat16"

    def groups(self, bits: Bits) -> tuple[int, ...]:
        """How many numbers of a row share a scale where a server packs this model: the sizes, largest first."""
        from tinker_local.backend.weights.packed import packable_modules
        from tinker_local.backend.weights.packed_stack import packable_experts

        decoder = self.model.get_submodule(self.family.decoder_path)
        sizes = {group_of(module.in_features, bits) for _, module in packable_modules(decoder)}
        for _, _, stacks in packable_experts(decoder):
            sizes |= {group_of(stack.shape[2], bits) for stack in (stacks.gate_up, stacks.down)}
        return tuple(sorted((size for size in sizes if size), reverse=True))

    def target_modules(self, paths: Sequence[str]) -> tuple[str, ...]:
        """PEFT's `target_modules` for exactly these paths."""
        from tinker_local.backend.training.lora.lora import target_modules

        return target_modules(self.model, paths)

    def check(self, paths: Sequence[str], shapes: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        """InvalidRequestError unless each path is a matrix [out, in] of the model, with A [r, in] and B [out, r], or a
        projection of its experts."""
        modules = dict(self.model.named_modules())
        for path in paths:
            a, b = shapes[path]
            if (experts := self._experts(modules, path)) is not None:
                rank = b[-1] if b else 0
                wanted = [experts.shape("A", rank), experts.shape("B", rank)]
                fits, has = [a, b] == wanted, f"experts for A {[*wanted[0]]} and B {[*wanted[1]]}"
            else:
                weight = getattr(modules.get(path), "weight", None)
                has = "no such module" if weight is None else f"a matrix {list(weight.shape)}"
                fits = weight is not None and (*b[:1], *a[1:]) == tuple(weight.shape) and a[:1] == b[1:]
            if not fits:
                raise InvalidRequestError(
                    f"the adapter does not fit the base model {self.path}: it has A {list(a)} and B {list(b)} for "
                    f"{path}, and the model has {has} there; name another with --base"
                )

    def _experts(self, modules: Mapping[str, Any], path: str) -> "Target | None":
        """The projection of experts at `path`, if it is one."""
        from tinker_local.backend.training.model.decoders.packed_experts import expert_targets

        module, _, _ = path.rpartition(".")
        if self.family.lora.experts is None or not hasattr(modules.get(module), EXPERTS_GATE_UP):
            return None
        targets = expert_targets(module, "", 0, modules[module], self.family.lora.experts)
        return next((target for target in targets if target.path == path), None)


def find_base(path: str, called: str) -> BaseModel:
    """The model at `path`, a folder or hub name, that `called` (an option or a checkpoint) names."""
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    given = Path(path).expanduser()
    where = str(given.absolute()) if given.is_dir() else path
    try:
        file = cached_file(where, "config.json")
        config = AutoConfig.from_pretrained(where)
        forget_quantization(config)  # which `published` tells of
    except (OSError, ValueError) as error:
        raise NotFoundError(
            f"{called}: the base model {path!r} is neither a folder of a model nor one that the hub or its cache has; "
            f"pass --base FOLDER ({str(error).splitlines()[0]})"
        ) from None
    return BaseModel(where, Path(file).parent, config, family_of(config.model_type, where))
