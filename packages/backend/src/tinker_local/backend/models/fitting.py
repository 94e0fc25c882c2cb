"""Which models fit which GPU, and with how long a context: the plan that `serve` makes, without the GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinker_local.backend.models.gpu_plan import model_sizes
from tinker_local.backend.models.placement import ONE_GPU, Layout, check_precision, shares_weights
from tinker_local.backend.models.plan_layout import GpuMemory, PlannedLayout, PlannedModel, plan_layout
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.training.run.block_memory import attention_memory, decoder_memory, mlp_memory
from tinker_local.backend.training.run.recompute_policy import ActivationMemory
from tinker_local.backend.weights.precision import Packable
from tinker_local.backend.weights.published import published_of

GIB = 2**30
CONTEXT = GIB // 2
"""What the CUDA context of the process that plans takes from a free GPU."""

STEP = 1024
"""Positions, to whose multiples a context is rounded down."""

GPUS = {
    "RTX 3060": 11.6,
    "RTX 4060 Ti 16GB": 15.6,
    "L4": 22.0,
    "A10": 22.0,
    "RTX 3090": 23.5,
    "RTX 4090": 23.5,
    "RTX 5090": 31.3,
    "A100 40GB": 39.4,
    "L40S": 44.4,
    "RTX A6000": 47.4,
    "A100 80GB": 79.2,
    "H100": 79.2,
    "H200": 139.8,
    "B200": 178.3,
}
"""GiB that CUDA says that they have, or a little less."""
COLUMNS = {
    "12 GB: 3060": "RTX 3060",
    "16 GB: 4060 Ti": "RTX 4060 Ti 16GB",
    "22 GiB: L4, A10": "L4",
    "24 GB: 3090, 4090": "RTX 4090",
    "32 GB: 5090": "RTX 5090",
    "48 GB: L40S, A6000": "L40S",
    "80 GB: A100, H100": "H100",
    "141 GB and more: H200, B200": "H200",
}
"""Of README's table: the card that has least."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, as its published config has them. `parameters`: of the whole model; a tied LM head counts
    once. `tower`: layers, hidden and intermediate size of its vision tower; empty if it has none."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    positions: int
    parameters: int
    tower: tuple[int, ...] = ()


SHAPES = {
    "Qwen/Qwen3-0.6B": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960, 596_049_920),
    "Qwen/Qwen3-1.7B": Shape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, 40960, 1_720_574_976),
    "Qwen/Qwen3-4B": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960, 4_022_468_096),
    "Qwen/Qwen3-8B": Shape("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 40960, 8_190_735_360),
    "Qwen/Qwen3-14B": Shape("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False, 40960, 14_768_307_200),
    "Qwen/Qwen3-32B": Shape("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False, 40960, 32_762_123_264),
    "meta-llama/Llama-3.2-1B": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, True, 131072, 1_235_814_400),
    "meta-llama/Llama-3.2-3B": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, True, 131072, 3_212_749_824),
    "meta-llama/Llama-3.1-8B": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072, 8_030_261_248),
    "mistralai/Mistral-7B-v0.3": Shape("mistral", 4096, 14336, 32, 32, 8, 128, 32768, False, 32768, 7_248_023_552),
    "Qwen/Qwen3-VL-4B-Instruct": Shape(
        "qwen3_vl", 2560, 9728, 36, 32, 8, 128, 151936, True, 262144, 4_437_815_808, (24, 1024, 4096)
    ),
    "Qwen/Qwen3-VL-8B-Instruct": Shape(
        "qwen3_vl", 4096, 12288, 36, 32, 8, 128, 151936, False, 262144, 8_767_123_696, (27, 1152, 4304)
    ),
}


@dataclass(frozen=True, slots=True)
class Fit:
    """`context`: the longest that fits, in positions, 0 if not even `STEP` does; `wanted`: the one that `serve` wants,
    and refuses to start without; `least`: why not even `STEP`, in the planner's words. `planned`: for `context`."""

    context: int
    wanted: int
    parameters: int
    least: str = ""
    planned: PlannedLayout | None = None

    @property
    def layout(self) -> Layout:
        """Of the plan."""
        return ONE_GPU if self.planned is None else self.planned.layout


def known_config(name: str) -> Any:
    """The config of a model of `SHAPES`, of transformers."""
    import transformers

    shape = SHAPES[name]
    text = _text_config(shape)
    if not shape.tower:
        return transformers.AutoConfig.for_model(shape.model_type, **text)
    sizes = dict(zip(("depth", "hidden_size", "intermediate_size"), shape.tower, strict=True))
    tower = {**sizes, "out_hidden_size": shape.hidden}
    return transformers.AutoConfig.for_model(
        shape.model_type, text_config=text, vision_config=tower, tie_word_embeddings=shape.tied
    )


def _text_config(shape: Shape) -> dict[str, Any]:
    """The fields of a text config of transformers."""
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }


class Fitting:
    """A model on GPUs of any size, as `options` say; without them in bfloat16, with the defaults."""

    def __init__(self, model: PlannedModel, options: BackendOptions, published: str | None = None) -> None:
        """`published`: in which fewer bits its files have the base, in words."""
        self.model = model
        self._options = options
        self.published = published

    @classmethod
    def known(cls, name: str, options: BackendOptions | None = None) -> "Fitting":
        """One of `SHAPES`, from its numbers: without torch. Its tower is frozen, and its layers are written out."""
        shape, options = SHAPES[name], options or BackendOptions()
        itemsize = _itemsize(options)

        def memory(tokens: int, columns: int) -> ActivationMemory:
            heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_size": shape.head_size}
            layer = (
                attention_memory(tokens, columns, itemsize, **heads),
                mlp_memory(tokens, columns, itemsize, intermediate=shape.intermediate),
            )
            return decoder_memory([layer] * shape.layers, tokens * shape.hidden * itemsize)

        sizes = model_sizes(
            _text_config(shape),
            shape.parameters,
            itemsize,
            _packable(shape),
            options.base_precision,
            Packable.of([(shape.vocabulary, shape.hidden)] * (1 if shape.tied else 2)),
            options.head_precision,
        )
        vision = bool(shape.tower)
        return cls(PlannedModel(sizes, memory, shape.positions, shape.kv_heads, vision, one_copy=True), options)

    @classmethod
    def of(cls, config: Any, options: BackendOptions | None = None) -> "Fitting":
        """Any model, from its config of transformers: torch makes its modules without values. UnsupportedError if it is
        not served."""
        from tinker_local.backend.models.load_engines import check_packable, longrope_context
        from tinker_local.backend.models.place_engines import planned_model
        from tinker_local.backend.training.model.load_model import supported_family

        options = options or BackendOptions()
        longest = options.max_context_length or longrope_context(config.get_text_config())
        options = replace(options, max_context_length=longest)
        family = supported_family(config, config.name_or_path)
        check_packable(config, family, options)
        model = planned_model(
            config,
            options,
            options.dtype or "bfloat16",
            train_vision=options.train_vision and family.vision is not None and not family.vision.frozen,
            one_copy=family.one_copy or options.base_precision is not None,  # packed experts are as vLLM has them
        )
        published = published_of(config.name_or_path)
        return cls(model, options, None if published is None else published.told)

    def on(self, gpus: Sequence[GpuMemory]) -> Fit:
        """On free `gpus`."""
        longest = min(self._options.max_context_length or self.model.longest, self.model.longest)
        try:
            planned = self._plan(gpus, min(STEP, longest))
        except ValueError as error:
            return Fit(0, longest, self.model.sizes.parameters, str(error))
        fits, too_long = 1, math.ceil(longest / STEP) + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            try:
                planned = self._plan(gpus, min(middle * STEP, longest))
                fits = middle
            except ValueError:
                too_long = middle
        return Fit(min(fits * STEP, longest), longest, self.model.sizes.parameters, planned=planned)

    def _plan(self, gpus: Sequence[GpuMemory], context: int) -> PlannedLayout:
        options = replace(self._options, max_context_length=context)
        check_precision(options, len(gpus), published=self.published)
        one_copy = self.model.one_copy and shares_weights(options, len(gpus), published=self.published is not None)
        return plan_layout(replace(self.model, one_copy=one_copy), options, len(gpus), lambda gpu: gpus[gpu])


def _packable(shape: Shape) -> Packable | None:
    attention, of_keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    outputs = (attention, of_keys, of_keys, shape.intermediate, shape.intermediate)
    layer = [(each, shape.hidden) for each in outputs]
    layer += [(shape.hidden, inputs) for inputs in (attention, shape.intermediate)]
    return Packable.of(layer * shape.layers)


def _itemsize(options: BackendOptions) -> int:
    """Bytes of a number of the weights on a GPU."""
    return 4 if options.dtype == "float32" else 2


def free_gpu(gib: float, name: str = "") -> GpuMemory:
    """A GPU of `gib` GiB that nothing else uses."""
    return GpuMemory(int(gib * GIB - CONTEXT), int(gib * GIB), name)


def row(name: str) -> str:
    """Of the table of README, for one of `SHAPES`: the longest context on each card of `COLUMNS`, if it fits there."""
    fitting = Fitting.known(name)
    contexts = [fitting.on([free_gpu(GPUS[gpu], gpu)]).context for gpu in COLUMNS.values()]
    return f"| {name} | {' | '.join(f'{context:,}' if context else '–' for context in contexts)} |"
