"""Any model of transformers that reads images and has no family here: what it is made of is found in its own class.

Its own processor says what an image is in a prompt. Its own forward computes features and positions: it is called as
anybody calls it, up to the language model, which is not run. A trainer that starts with one compares it with the whole
forward (`training/run/picture_check.py`), and a server both engines, with an adapter, too.
"""

import functools
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker_local.backend.families import glm4_moe
from tinker_local.backend.families.family import (
    Experts,
    Family,
    ImageFeatures,
    LoraNames,
    Positions,
    Vision,
    VLLMHead,
    text_position_ids,
)
from tinker_local.backend.rendering.rendered_input import ImageTokens, RenderedImage, RenderedInput
from tinker_local.backend.weight_files import folder_on_disk
from tinker_local.types import UnsupportedError

AUTO_CLASS = "AutoModelForImageTextToText"
DECODER_PATH = "model.language_model"
"""Where the language model is in most of these classes."""

_TRAINED_TOWERS = ("exaone4_5", "idefics3", "lfm2_vl", "llava_next", "pixtral", "qwen2_vl", "smolvlm")
"""Of which vLLM takes adapters on tower and projector, and computes what transformers does
(`benchmarks/architectures.py`). The name of the tower, where one class has several."""

_FROZEN_TOWERS = {
    **dict.fromkeys(("internvl", "mistral3"), "vLLM's class of this architecture takes no adapters on its tower"),
    **dict.fromkeys(
        ("glm4v", "glm4v_moe", "glm_ocr"), "vLLM takes no adapters on gate_proj and up_proj of towers of this kind"
    ),
    "clip_vision_model": "vLLM counts the positions of such a tower without its class token, and fails with adapters",
}
"""Why others stay as they are."""

_RAW_IN_VLLM = ("exaone4_5",)
"""Of which vLLM 0.32 says that it normalises pixels inside its class, as that of Qwen2.5-VL does, and does not."""

_INSIDE = "vision_model"
"""What vLLM and published files have around the modules of CLIP's and SigLIP's towers, and transformers no more."""

_EXPERTS: Mapping[str, Experts] = {"glm4v_moe_text": glm4_moe.EXPERTS, "qwen3_moe": Experts()}
"""Of the text configs with routed experts that adapters train, by their `model_type`."""

BY_LAYER = "deepstack_features"
"""What Granite 4 Vision gives its layers: features for the positions of images, by the layer before which they are
added."""
_ADDED = {BY_LAYER, "vision_mask"}

KINDS = "mm_token_type_ids"
"""What transformers' forwards call the argument that says which positions are images, [1, N]."""

_NOT_GIVEN = {"attention_mask", "position_ids", "past_key_values", "inputs_embeds", "use_cache", "cache_position"}
"""What a class may give its language model, and the trainer makes itself. `logits_to_keep` and the like have no use
there."""
_WITHOUT_EFFECT = {"return_dict", "output_attentions", "output_hidden_states", "logits_to_keep", "labels"}


@dataclass(frozen=True, slots=True)
class Parts:
    """Paths in transformers' model: of the language model's layers, of the vision tower (empty if no module is named
    like one), and of what is between both. `rope_index`: whether positions depend on images; `arguments`: what the
    class's forward takes, by name."""

    decoder: str
    tower: str
    between: tuple[str, ...]
    rope_index: bool
    arguments: frozenset[str]

    def __str__(self) -> str:
        by_way_of = f" by way of {', '.join(self.between)}" if self.between else ""
        return f"{self.tower or 'its class'}{by_way_of} into {self.decoder}"


def sees(model_type: str, where: str) -> bool:
    """Whether the model at `where`, whose config is on this machine, has a part for images, and transformers a class
    that reads images and texts for its `model_type`. Imports torch for a model with such a part alone."""
    folder = folder_on_disk(where)
    if folder is None or not (folder / "config.json").is_file():
        return False
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError:
        return False
    if not isinstance(config, dict) or not _SIGHT & {*config}:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


_SIGHT = {"vision_config", "vq_config"}
"""What configs call the part for images."""


@functools.lru_cache(64)
def seeing_family(model_type: str, where: str) -> Family:
    """The family of the model at `where`, a folder or hub name; UnsupportedError for a class without the parts that the
    trainer needs."""
    model = _without_values(where)
    _check_sight(model, where)
    parts, text = parts_of(model, where), model.config.get_text_config()
    return Family(
        auto_class=AUTO_CLASS,
        decoder_path=parts.decoder,
        position_ids=functools.partial(_class_positions, where) if parts.rope_index else text_position_ids,
        vision=Vision(
            tower=parts.tower,
            vllm_tower=parts.tower.removeprefix("model."),
            tokens=_image_tokens,
            read_image=None,
            encode_images=functools.partial(encode_images, parts),
            arguments=functools.partial(_arguments, parts),
            frozen=why_frozen(model.config, parts),
            found=str(parts),
            touching=not parts.rope_index,
            connectors=parts.between,
            untrained=_layers_not_read(model, parts),
            inside=_inside(model, parts),
            raw_in_vllm=model_type in _RAW_IN_VLLM,
        ),
        lora=LoraNames(attn=(), mlp=(), every_linear=True, experts=_EXPERTS.get(text.model_type)),
        logits=None,
        vllm_head=VLLMHead(),
        logits_left_out=_logits_left_out(model),
        model_type=model_type,
    )


def why_frozen(config: Any, parts: Parts) -> str:
    """Why adapters do not train the tower of a model of `config`; empty if they do."""
    if not parts.tower:
        return "no module of its class is named like a vision tower"
    kind = config.model_type
    if kind == "llava":  # with CLIP's or Pixtral's
        kind = config.vision_config.model_type
    if kind in _TRAINED_TOWERS:
        return ""
    return _FROZEN_TOWERS.get(
        kind, f"it has not been seen that vLLM computes adapters on towers of {kind} models as transformers does"
    )


def _layers_not_read(model: Any, parts: Parts) -> tuple[str, ...]:
    """Paths of layers of the tower after those whose output the projector reads. vLLM does not have them."""
    read = getattr(model.config, "vision_feature_layer", None)
    if read is None or not parts.tower:
        return ()
    tower = model.get_submodule(parts.tower)
    found = next(((name, each) for name, each in tower.named_modules() if name.rpartition(".")[2] == "layers"), None)
    if found is None:
        return ()
    path, layers = found
    states = len(layers) + 1  # what enters the first one, too
    last = max(at % states for at in ([read] if isinstance(read, int) else read))
    return tuple(f"{parts.tower}.{path}.{at}" for at in range(last, len(layers)))


def _inside(model: Any, parts: Parts) -> str:
    kind = getattr(getattr(model.config, "vision_config", None), "model_type", "")
    known = kind in ("clip_vision_model", "siglip_vision_model", "siglip2_vision_model") and parts.tower
    return _INSIDE if known and not hasattr(model.get_submodule(parts.tower), _INSIDE) else ""


def parts_of(model: Any, where: str) -> Parts:
    """Those of transformers' `model`; UnsupportedError names the first that is missing."""
    kind = type(model).__name__
    inner = getattr(model, "model", None)
    if inner is None or not hasattr(model, "lm_head"):
        raise UnsupportedError(
            f"{where}: transformers' {kind} has no parts `model` and `lm_head`, as others that see do"
        )
    decoder = model.get_decoder()
    paths = {module: name for name, module in model.named_modules()}
    if decoder not in paths or not hasattr(decoder, "layers") or not paths[decoder].startswith("model."):
        raise UnsupportedError(f"{where}: transformers' {kind} has no language model with `layers` below `model`")
    path = paths[decoder]
    deep = [name for name in inspect.signature(type(decoder).forward).parameters if "deepstack" in name]
    if unknown := {*deep} - {BY_LAYER}:
        raise UnsupportedError(
            f"{where}: the layers of transformers' {kind} add features of images to what they give "
            f"({min(unknown)}), which the trainer does in families that it knows"
        )
    others = [name for name, _ in inner.named_children() if not f"{path}.".startswith(f"model.{name}.")]
    tower = next((name for name in others if "vis" in name or "image" in name), "")
    return Parts(
        decoder=path,
        tower=f"model.{tower}" if tower else "",
        between=tuple(f"model.{name}" for name in others if name != tower),
        rope_index=hasattr(inner, "get_rope_index"),
        arguments=frozenset(inspect.signature(type(inner).forward).parameters),
    )


def _check_sight(model: Any, where: str) -> None:
    """UnsupportedError for a model whose images see forward: a family says in which layers. Gemma 3's config says so of
    texts alone: its class lets images in any case."""
    kind = model.config.model_type
    seen = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    told = f"use_bidirectional_attention is {seen!r}"
    if kind == "paligemma":
        raise UnsupportedError(
            f"{where}: a prompt of PaliGemma sees all of itself, the text after the image too ({told}), and vLLM lets "
            "the positions of the image alone see those after them: it samples from another model than was published; "
            "nor do data say where a prompt ends, as training it needs"
        )
    if seen is False:
        inner = type(getattr(model, "model", model))
        if _SEEING_ALL not in inspect.getsource(inner.forward):
            return
        told = f"transformers' {inner.__name__} makes masks with {_SEEING_ALL}"
    if seen is not None:
        raise UnsupportedError(
            f"{where}: in model_type {kind!r} positions see what follows them ({told}), which the "
            "trainer computes for families that it knows"
        )


_SEEING_ALL = "block_sequence_ids"
"""What functions of transformers that make masks call the argument that says which positions see each other."""


def _logits_left_out(model: Any) -> str:
    """See `Family.logits_left_out`: a class that sees runs the layers of its language model, and not the whole class,
    whose forward makes more of the LM head's output. So does LLaVA-NeXT with Granite vision's text."""
    text, own = model.config.get_text_config(), inspect.getsource(type(model).forward)
    found = {name: getattr(text, name, None) for name in _AFTER_HEAD if name not in own}
    return ", ".join(f"{name} {value}" for name, value in found.items() if value not in (None, _AFTER_HEAD[name]))


_AFTER_HEAD = {"logits_scaling": 1.0, "logit_scale": 1.0, "final_logit_softcapping": None}
"""Fields of text configs that say what becomes of the LM head's output, with the values that say nothing."""


def _without_values(where: str) -> Any:
    """transformers' model on torch's meta device; UnsupportedError in a sentence if it makes none."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(where)
        with torch.device("meta"):
            model = getattr(transformers, AUTO_CLASS).from_config(deepcopy(config))
    except Exception as error:  # of any type: its fields are not checked before
        first = str(error).strip().partition("\n")[0]
        raise UnsupportedError(
            f"{where}: transformers makes no model of its config.json ({type(error).__name__}: {first})"
        ) from error
    return model.eval().requires_grad_(False)


def _image_tokens(config: Any) -> ImageTokens:
    """The id that processors replace by an image."""
    found = getattr(config, "image_token_id", None)
    if found is None:
        found = getattr(config, "image_token_index", None)
    if found is None:
        raise UnsupportedError(
            f"{config.name_or_path}: its config has no image_token_id, the token that stands for an image"
        )
    return ImageTokens(None, int(found), None)


# The trainer's side ---------------------------------------------------------------------------------------------------


class _GivenError(Exception):
    """Ends a forward where the language model begins."""


@contextmanager
def _before(decoder: Any) -> Iterator[list[Mapping[str, Any]]]:
    """Forwards end where `decoder` would run; what it was given is in the list."""
    calls: list[Mapping[str, Any]] = []

    def forward(*args: Any, **given: Any) -> None:
        calls.append({**dict(zip(("input_ids",), args, strict=False)), **given})
        raise _GivenError

    own = decoder.__dict__.get("forward")
    decoder.forward = forward
    try:
        yield calls
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


def given_to_layers(model: Any, parts: Parts, **arguments: Any) -> Mapping[str, Any]:
    """What transformers' `model` gives its language model for these arguments of its forward."""
    with _before(model.get_submodule(parts.decoder)) as calls:
        try:
            model.model(**arguments, use_cache=False)
        except _GivenError:
            return calls[0]
    raise UnsupportedError(f"transformers' {type(model).__name__} does not call its language model at {parts.decoder}")


def encode_images(parts: Parts, model: Any, images: Sequence[RenderedImage]) -> ImageFeatures:
    """The features of `images`, which are alike, as of a batch of prompts that each have one of them alone.
    transformers' classes pad images of several sizes, and then round otherwise."""
    return _features(parts, model, images)


def _features(parts: Parts, model: Any, images: Sequence[RenderedImage]) -> ImageFeatures:
    """What replaces the embeddings of the ids of `images`, in order, and what layers add there."""
    import torch

    positions = images[0].positions
    assert positions is not None, "images of models without a family have their own ids"
    embedding = model.get_input_embeddings().weight
    ids = torch.from_numpy(positions.ids.astype(np.int64)).to(embedding.device).repeat(len(images), 1)
    holds = torch.from_numpy(positions.holds_features).to(embedding.device)
    is_image = holds.int().repeat(len(images), 1)
    given = given_to_layers(model, parts, input_ids=ids, **_arguments(parts, images, is_image))
    check_given(model, given)
    levels: Mapping[int, Any] = dict(sorted((given.get(BY_LAYER) or {}).items()))
    return ImageFeatures(
        given["inputs_embeds"][:, holds].flatten(0, 1), tuple(levels.values()), tuple(at - 1 for at in levels)
    )


def check_given(model: Any, given: Mapping[str, Any]) -> None:
    """UnsupportedError if layers read more than embeddings at positions."""
    known = _NOT_GIVEN | _WITHOUT_EFFECT | _ADDED
    unknown = {name for name, value in given.items() if name not in known and value is not None}
    if given.get("inputs_embeds") is None:
        unknown.add("input_ids")
    if unknown:
        raise UnsupportedError(
            f"transformers' {type(model).__name__} gives its layers {', '.join(sorted(unknown))} beside embeddings, "
            "which the trainer does not"
        )


def _arguments(parts: Parts, images: Sequence[RenderedImage], is_image: Any) -> dict[str, Any]:
    """Of transformers' forward for the `images` of one input; `is_image` [1, N], which says where features are."""
    import torch

    names = ["pixel_values", *images[0].further] if images else []
    found = {
        name: torch.from_numpy(_joined([tensors_of(image)[name] for image in images])).to(is_image.device)
        for name in names
    }
    return found | ({KINDS: is_image} if KINDS in parts.arguments or parts.rope_index else {})


def tensors_of(image: RenderedImage) -> dict[str, npt.NDArray[Any]]:
    """All that the class takes of an image, by name."""
    return {"pixel_values": image.pixel_values, **image.further}


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """A copy along the first axis, the others padded with zeros at their ends, as processors do."""
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    sizes = np.max([array.shape[1:] for array in arrays], axis=0)
    padded = [
        np.pad(array, ((0, 0), *((0, int(size) - own) for size, own in zip(sizes, array.shape[1:], strict=True))))
        for array in arrays
    ]
    return np.concatenate(padded)


# Positions ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(8)
def _class_of(where: str) -> Any:
    """The part of transformers' model, without values, that makes positions."""
    return _without_values(where).model


@functools.lru_cache(8)
def _names_of(function: Any) -> frozenset[str]:
    """What its arguments are called. Positions are made for each datum of a step."""
    return frozenset(inspect.signature(function).parameters)


def _class_positions(where: str, config: Any, input: RenderedInput) -> Positions:
    """Of the class's own `get_rope_index`, int64 [rows, N]. Only `input.images` says where images are: their id
    elsewhere is another one for the class."""
    import torch

    inner = _class_of(where)
    holds = input.holds_features
    marks = _image_tokens(config)
    ids = input.token_ids.astype(np.int64)
    ids[(ids == marks.pad) & ~holds] = 0
    kinds = torch.from_numpy(holds.astype(np.int64))[None]
    images = [placed.image for placed in sorted(input.images, key=lambda placed: placed.offset)]
    names = _names_of(type(inner).get_rope_index)
    tensors = {
        name: torch.from_numpy(_joined([tensors_of(image)[name] for image in images]))
        for name in (images[0].further if images else ())
        if name in names
    }
    given: dict[str, Any] = {KINDS: kinds} if KINDS in names else {}
    found, _ = inner.get_rope_index(torch.from_numpy(ids)[None], **given, **tensors)
    positions: Positions = found[:, 0].numpy().astype(np.int64)
    return positions
