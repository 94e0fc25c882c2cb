"""Names that earlier versions of transformers gave modules, in adapters of that time: Gemma 3 of 4.50 called
`model.language_model` `language_model.model`. transformers renames the tensors of checkpoints by rules, and PEFT those
of adapters by the same rules."""

from functools import cache
from typing import Any

from tinker_local.backend.families.family import Family


def name_now(path: str, family: Family) -> str:
    """What transformers calls the module of `family` now that `path` named in an earlier version; other paths stay as
    they are. Builds a model without values, once for each family."""
    for renaming in _renamings(family.model_type, family.auto_class) if family.model_type else ():
        path = renaming.rename_source_key(path)[0]
    return path


@cache
def _renamings(model_type: str, auto_class: str) -> tuple[Any, ...]:
    """As PEFT uses them. The sizes of the model do not matter, so its configuration is the class's own."""
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(transformers.AutoConfig.for_model(model_type))
    rules = get_model_conversion_mapping(model, add_legacy=False)
    return tuple(rule for rule in rules if isinstance(rule, WeightRenaming))
