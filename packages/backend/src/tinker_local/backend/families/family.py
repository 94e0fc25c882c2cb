"""What is known of a model family beyond Hugging Face's classes. Importing families loads no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from tinker_local.backend.rendering.rendered_input import (
    ImageProcessor,
    ImageTokens,
    RenderedImage,
    RenderedInput,
    TrainerImage,
)

if TYPE_CHECKING:
    import torch

Positions = npt.NDArray[np.int64]

HOSTED_DECODER = "model"
HOSTED_TIED_HEAD = "model.unembed_tokens"
"""Names of modules in exported adapters, for every family, as the hosted service writes and the cookbook's exporters
read them: an untied LM head keeps its name, a tied one must not be taken for a tensor `lm_head`."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Features of images, for P positions in all: `embeds` [P, hidden] replaces token embeddings; each of `deepstack`
    [P, hidden] is added to the hidden states after the decoder layer whose number is in `after`; -1: to what enters the
    first."""

    embeds: "torch.Tensor"
    deepstack: "tuple[torch.Tensor, ...]" = ()
    after: tuple[int, ...] = ()

    @staticmethod
    def joined(features: "Sequence[ImageFeatures]") -> "ImageFeatures":
        """Those of several lists of images of one model as those of one."""
        import torch

        if len(features) == 1:
            return features[0]
        levels = zip(*(each.deepstack for each in features), strict=True)
        embeds = torch.cat([each.embeds for each in features])
        return ImageFeatures(embeds, tuple(torch.cat(level) for level in levels), features[0].after)

    def split(self, sizes: "Sequence[int]") -> "list[ImageFeatures]":
        """Views of the features of images that have so many positions."""
        parts = zip(*(level.split([*sizes]) for level in (self.embeds, *self.deepstack)), strict=True)
        return [ImageFeatures(embeds, tuple(deepstack), self.after) for embeds, *deepstack in parts]


@dataclass(frozen=True, slots=True)
class LogitRule:
    """How the LM head's output x becomes logits: `scale` x, and with a `softcap` c: c tanh(scale x / c)."""

    scale: float = 1.0
    softcap: float | None = None

    def of(self, outputs: "torch.Tensor") -> "torch.Tensor":
        """The logits."""
        scaled = self.scale * outputs
        return scaled if self.softcap is None else self.softcap * (scaled / self.softcap).tanh()


PLAIN_LOGITS = LogitRule()


def text_position_ids(config: Any, input: RenderedInput) -> Positions:
    """Positions counted from 0, int64 [1, N]."""
    return np.arange(input.length, dtype=np.int64)[None]


@dataclass(frozen=True, slots=True)
class SplitRows:
    """A Linear module whose rows adapters train as several projections, each with its own A and B.

    `projections`: their last names in adapters, which transformers' model does not have. `heights(parent)`: how many
    rows each has, in order, from the module that holds the Linear.
    """

    projections: tuple[str, ...]
    heights: Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Experts:
    """What the parts of a layer with routed experts are called.

    transformers has one module of all experts of a layer, `experts` in `module`, whose parameters `gate_up_proj`
    [E, 2 I, H] and `down_proj` [E, H, I] are not Linear modules. Adapters call their projections `gate`, `up` and
    `down`, below the module's name. Files have these parameters, or a matrix for each expert and projection, which
    they call by `in_files`. `transposed`: whether the parameters are [E, H, 2 I] and [E, I, H] there. `interleaved`:
    whether gate and up take turns there, number by number; otherwise gate comes first. `block`: what files and vLLM
    call `module`.

    In transformers' `module`: `router`, which gives logits, scores and experts; `bias`, the buffer of its choice that
    it takes beside its input, if that is not its own; `shared`, the expert that every position takes; `shared_gate`,
    what its output is multiplied by. Empty: there is none.

    `peft_fuses`: whether PEFT takes targets that are called as matrices of experts `in_files` for those of experts
    alone, so that an export names the parameters of other such modules, of which it does not.
    """

    gate: str = "w1"
    up: str = "w3"
    down: str = "w2"
    in_files: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    interleaved: bool = False
    module: str = "mlp"
    block: str = "mlp"
    router: str = "gate"
    bias: str = ""
    shared: str = ""
    shared_gate: str = ""
    peft_fuses: bool = False

    @property
    def names(self) -> tuple[str, str, str]:
        """Of all projections."""
        return self.gate, self.up, self.down

    def path_in_files(self, path: str) -> str:
        """The module or tensor at `path` of transformers' model as files and vLLM have it, if it is of experts."""
        return path.replace(f".{self.module}.experts.", f".{self.block}.experts.")

    def path_here(self, path: str) -> str:
        """The reverse of `path_in_files`."""
        return path.replace(f".{self.block}.experts.", f".{self.module}.experts.")

    def has(self, path: str) -> bool:
        """Whether the module at `path` of an adapter is a projection of experts. The last names of these may be those
        of an MLP, too."""
        parent, _, last = path.rpartition(".")
        return last in self.names and parent.rpartition(".")[2] == "experts"


@dataclass(frozen=True, slots=True)
class LoraNames:
    """The last names of the projections in the decoder's layers that adapters train, by the field of `LoraConfig`
    (`train_attn`, `train_mlp`) that asks for them. They are Linear modules, or parts of one of `split`, by its name.
    `experts`: of mixtures of experts, which `train_mlp` enables too. `every_linear`: all Linear modules of a layer but
    those that choose experts; `train_attn` enables what is below a module whose name has `attn` or `attention` in it,
    and `train_mlp` the rest."""

    attn: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    split: Mapping[str, SplitRows] = field(default_factory=dict)
    experts: Experts | None = None
    every_linear: bool = False

    def flag(self, path: str) -> Literal["attn", "mlp"] | None:
        """Which field enables the module at `path`, or the part of one; None if adapters do not train it."""
        parent, _, last = path.rpartition(".")
        if self.every_linear:
            if ".layers." not in f".{path}" or last in ROUTERS:
                return None
            return "attn" if "attn" in parent or "attention" in parent else "mlp"
        if last in self.attn:
            return "attn"
        return "mlp" if last in (*self.mlp, *(self.experts.names if self.experts else ())) else None

    @staticmethod
    def keys_are_values(parent: Any, last: str) -> bool:
        """Whether adapters do not train the module `last` of transformers' `parent`, whatever it is called: a
        projection of keys that are values, too. Of such an adapter vLLM adds to the keys alone."""
        return last == "k_proj" and getattr(parent, "v_proj", parent) is None


ROUTERS = ("gate", "router", "shared_expert_gate")
"""Modules that choose experts, and the gate of a shared one: vLLM loads adapters of them and computes without."""


@dataclass(frozen=True, slots=True)
class VLLMHead:
    """vLLM's class of a language model that does not declare its LM head as a LoRA target: `name` in `module` of
    `vllm.model_executor.models`; by default the one that vLLM chooses for the model, if it does not. `embedding`: path
    of the head's matrix if the class has no `lm_head`. `declared_by`: the oldest vLLM seen to declare it, `"0.32"` for
    instance; empty if none does."""

    module: str = ""
    name: str = ""
    embedding: str | None = None
    declared_by: str = ""


def unlike(config: Any, name: str, **fixed: Any) -> str:
    """Why the class `name`, of vLLM if it is not said to be transformers', computes a model of `config` otherwise:
    the first of the fields `fixed` that has another value than the one that the class takes for given; empty if none
    has."""
    owner = "" if " " in name else "vLLM's "
    for field_name, value in fixed.items():
        if (found := getattr(config, field_name, None)) != value:
            return f"{field_name} is {found}, and {owner}{name} computes as if it were {value}"
    return ""


@dataclass(frozen=True, slots=True)
class Vision:
    """How a family reads images.

    `tower`: path of the vision tower in the model, whose layers are its `blocks`. `vllm_tower`: the same in vLLM; its
    forward takes `grid_thw`, by name or second, or pixels alone, with a row for each image. `tokens(config)`: the ids
    that mark an image; UnsupportedError for a config whose images the engines compute differently.
    `read_image(processor, batch)`: the image in what the HF image processor returns for one; None: the model's own
    processor says what an image is in a prompt. `encode_images(model, images)`: features of images in order.
    `arguments(images, is_image)`: what transformers' forward takes for the images of one input, in order, beside its
    ids; `is_image` int32 [1, N], where features are. `whole_images`: whether the positions of an image see all of it,
    and not only what precedes them, if `whole_in(config)`. `frozen`: why adapters cannot train the tower; empty if they
    can. `found`: for a model without a family, the parts of its class by which images are read; empty for those that
    are written here. `touching`: whether images may follow each other without a token between their features.
    `connectors`: paths of what is between tower and language model, which `train_vision` trains, too. `untrained`:
    parts of both that features do not depend on. `inside`: what vLLM and published files have between the tower's path
    and those of its modules. `raw_in_vllm`: whether vLLM by itself gives the tower pixels that nothing normalises.
    """

    tower: str
    vllm_tower: str
    tokens: Callable[[Any], ImageTokens]
    read_image: Callable[[Any, Any], TrainerImage] | None
    encode_images: Callable[[Any, Sequence[RenderedImage]], ImageFeatures]
    arguments: Callable[[Sequence[RenderedImage], Any], dict[str, Any]]
    whole_images: bool = False
    whole_in: Callable[[Any], bool] = lambda config: True
    frozen: str = ""
    found: str = ""
    touching: bool = True
    connectors: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    inside: str = ""
    raw_in_vllm: bool = False

    def part_of(self, path: str) -> str | None:
        """The tower or connector that the module at `path` of the model is in."""
        roots = (self.tower, *self.connectors) if self.tower else ()
        return next((root for root in roots if path.startswith(f"{root}.")), None)

    def trains(self, path: str) -> bool:
        """Whether adapters train the module at `path`, if it is one of projections, or others inside."""
        return self.part_of(path) is not None and not any(f"{path}.".startswith(f"{each}.") for each in self.untrained)

    @property
    def by_processor(self) -> bool:
        """Whether the model's own processor makes the positions of an image, as of every model without a family."""
        return self.read_image is None

    def processor(self, model: str, config: Any) -> ImageProcessor[TrainerImage]:
        """What reads images for the trainer, of the model at a folder or hub name, with its config."""
        from tinker_local.backend.rendering.hf_images import HFImages, HFProcessorImages

        if self.read_image is None:
            return HFProcessorImages(model, self.tokens(config).pad)
        return HFImages(model, self.read_image)


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. The defaults suit a text model.

    `auto_class`: the transformers class that loads it. `decoder_path`: the module that turns `inputs_embeds` into
    hidden states. `position_ids(config, input)`: rotary positions of one rendered input, int64 [rows, N]. `vision`:
    None for text only. `lora`: what adapters train beside the LM head. `logits(config)`: what follows the LM head, from
    the text config; None: whatever transformers' model does. `logits_left_out`: the field of a text config, with its
    value, by which its own class makes logits, as vLLM does, and the class that `auto_class` names does not; empty for
    most. `vllm_head`: None if vLLM is known to take adapters of the LM head as it is. `unlike_vllm(config)`: why vLLM
    is known to compute a model of a config otherwise; empty if it is not. `quantized`: what to do with a checkpoint in
    fewer bits, which is refused. `hosted_attention`: what exports call the modules `self_attn`. `tool_parser`: of vLLM,
    for the form in which models of the family write calls of tools; None if they have none. `unused_tokens`: that
    published tokenizers have beyond the rows of the embedding. `model_type`: of its configs; empty for architectures
    without a family. `undivided`: why ranks cannot hold parts of the weights; empty if they can. `experts_of(where)`:
    `lora` of the model at a folder or hub name, of a family in which some models have experts; None of others.
    """

    auto_class: str = "AutoModelForCausalLM"
    decoder_path: str = "model"
    position_ids: Callable[[Any, RenderedInput], Positions] = text_position_ids
    vision: Vision | None = None
    lora: LoraNames = LoraNames()
    logits: Callable[[Any], LogitRule] | None = lambda config: PLAIN_LOGITS
    vllm_head: VLLMHead | None = None
    unlike_vllm: Callable[[Any], str] = lambda config: ""
    quantized: str = "give the original model"
    hosted_attention: str = "self_attn"
    tool_parser: str | None = None
    unused_tokens: tuple[str, ...] = ()
    logits_left_out: str = ""
    model_type: str = ""
    undivided: str = ""
    experts_of: "Callable[[str], LoraNames] | None" = None

    @property
    def unwritten(self) -> bool:
        """Whether nothing is written of its architecture here, and adapters train all that can be found in it."""
        return self.lora.every_linear

    @property
    def one_copy(self) -> bool:
        """Whether vLLM keeps all matrices as transformers has them, so that it can read a trainer's on a GPU. It turns
        experts round that are transposed."""
        return self.lora.experts is None or not self.lora.experts.transposed

    @property
    def head_adapters_in_vllm(self) -> bool:
        """Whether some vLLM, as it is, takes adapters of the LM head."""
        return self.vllm_head is None or bool(self.vllm_head.declared_by)

    def in_tower(self, path: str) -> bool:
        """Whether the module at `path` of the model is in its vision tower, or between that and the language model."""
        return self.vision is not None and self.vision.part_of(path) is not None

    def tower_in_vllm(self, path: str) -> str:
        """The module or tensor at `path`, as vLLM's loading knows it if it is in the vision tower."""
        if self.vision is None or not self.vision.inside:
            return path
        return path.replace(f"{self.vision.tower}.", f"{self.vision.tower}.{self.vision.inside}.", 1)

    def hosted_path(self, path: str, *, tied_head: bool) -> str:
        """The name in exports of the adapted module at `path`, in the decoder, the vision tower or the LM head.

        `tied_head`: whether the head's matrix is the embedding's. An untied head keeps its name, which PEFT and vLLM
        know, and so does the tower, for which the hosted service has none.
        """
        if self.in_tower(path):
            return path
        if path.startswith(f"{self.decoder_path}."):
            hosted = HOSTED_DECODER + path.removeprefix(self.decoder_path)
            return hosted.replace(".self_attn.", f".{self.hosted_attention}.")
        return HOSTED_TIED_HEAD if tied_head else path

    def own_path(self, path: str) -> str:
        """The reverse of `hosted_path`; other paths stay as they are."""
        if path == HOSTED_TIED_HEAD:
            return "lm_head"
        if path.startswith(f"{HOSTED_DECODER}.layers."):
            path = self.decoder_path + path.removeprefix(HOSTED_DECODER)
            path = path.replace(f".{self.hosted_attention}.", ".self_attn.")
        if self.lora.experts is not None:
            path = self.lora.experts.path_here(path)
        return path
