"""Load a base model for training: frozen, with a decoder that trains adapters on it."""

import contextlib
import functools
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tinker_local.backend.adapters.adapter import HEAD
from tinker_local.backend.families import FAMILIES, NO_FAMILY, OTHER, family_of
from tinker_local.backend.families.family import Family, LogitRule, Vision
from tinker_local.backend.options import DecoderChoice
from tinker_local.backend.stages import stage
from tinker_local.backend.training.kernels.choose_kernels import kernels_for
from tinker_local.backend.training.kernels.kernels import Kernels
from tinker_local.backend.training.lora.lora import HEAD_GROUP, Target
from tinker_local.backend.training.model.checkpoint_fit import check_files, check_finite, check_found
from tinker_local.backend.training.model.decoder import Decoder
from tinker_local.backend.training.model.decoders import make_decoder, tolerance_of
from tinker_local.backend.training.model.decoders.packed_short_conv import is_short_conv
from tinker_local.backend.training.model.file_names import places_in_files
from tinker_local.backend.training.model.found_tower import FoundTower
from tinker_local.backend.training.model.load_published import load_published
from tinker_local.backend.training.model.logit_rule import complete_logits, logit_rule
from tinker_local.backend.training.model.vision_attention import use_packed_attention
from tinker_local.backend.training.model.vision_tower import VisionTower
from tinker_local.backend.training.parallel.shared_rows import ONE_HAS_ALL, RowRanks
from tinker_local.backend.training.trainer_config import TrainerConfig
from tinker_local.backend.weight_files import folder_of
from tinker_local.backend.weights.frozen_matrix import FrozenMatrix
from tinker_local.backend.weights.kinds import maker_of
from tinker_local.backend.weights.large_weights import RESIDENT, LargeWeights
from tinker_local.backend.weights.lent_weights import SharedMatrices
from tinker_local.backend.weights.memory_holder import refuse
from tinker_local.backend.weights.packed import packed
from tinker_local.backend.weights.packed_stack import pack_decoder, packable_in
from tinker_local.backend.weights.packed_vocabulary import (
    is_tied,
    pack_vocabulary,
    packable_vocabulary,
    plain_product,
)
from tinker_local.backend.weights.precision import BITS, DENSE, Packable
from tinker_local.backend.weights.published import WEIGHTS, forget_quantization, published_of
from tinker_local.backend.weights.published_forms import UnknownMethodError
from tinker_local.backend.weights.share_matrices import share_matrices
from tinker_local.backend.weights.shared_memory import CannotShareError
from tinker_local.types import UnsupportedError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """`model`: transformers' whole model. `decoder`: runs from its embeddings to its LM head, whose matrix is `head`
    [V, H]. `tower`: of models that read images. `weights`: where those of decoder and head are. `kernels`: the
    operations of both besides matmuls. `logit_rule`: what follows the LM head. `max_positions`: the most of a
    sequence. `shared`: the matrices, if a sampler reads them too."""

    model: Any
    decoder: Decoder
    head: FrozenMatrix
    tower: VisionTower | FoundTower | None
    weights: LargeWeights
    kernels: Kernels
    logit_rule: LogitRule
    family: Family
    vocab_size: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device
    shared: SharedMatrices | None = None

    @property
    def tied_head(self) -> bool:
        """Whether the LM head shares the embedding's matrix."""
        return is_tied(self.model)

    @property
    def head_target(self) -> Target:
        """The LM head as a target of adapters."""
        return Target.of(HEAD, HEAD_GROUP, 0, self.model.lm_head, "unembed")


def decoder_of_sizes(config: Any, dtype: str, decoder: DecoderChoice) -> tuple[Decoder, int]:
    """The decoder that `load_model` chooses for a model of `config`, and the model's parameters. Its tensors are on
    torch's meta device: they have shapes and no values, so that it can tell its memory before anything is loaded."""
    family, place = family_of(config.model_type, config.name_or_path), torch.device("meta")
    model = without_values(config, family, dtype)
    _fix_frequencies(model.get_submodule(family.decoder_path), config.get_text_config().max_position_embeddings)
    kernels = kernels_for(place, DTYPES[dtype])
    found = make_decoder(model, family, kernels, decoder, config.name_or_path)
    return found, sum(parameter.numel() for parameter in model.parameters())


def packable(config: Any) -> Packable | None:
    """What of a model of `config` can be packed, or is by a published checkpoint; None if nothing can."""
    family = family_of(config.model_type, config.name_or_path)
    if (published := published_of(config.name_or_path)) is not None:
        return published.packable
    return packable_in(without_values(config, family).get_submodule(family.decoder_path))


def packable_head(config: Any) -> Packable | None:
    """Of a model of `config` its embedding and LM head, as they can be packed; None if they cannot."""
    family = family_of(config.model_type, config.name_or_path)
    if not family.one_copy or has_second_embedding(config):
        return None
    return packable_vocabulary(without_values(config, family))


def has_second_embedding(config: Any) -> bool:
    """Whether layers of a model of `config` read a second embedding. vLLM has both in one form."""
    return bool(getattr(config.get_text_config(), "hidden_size_per_layer_input", None))


def supported_family(config: Any, where: str) -> Family:
    """The family of a model of `config`; UnsupportedError if the trainer does not take its architecture. Loads no
    weights. `where`: the model's name."""
    family = family_of(config.model_type, where)
    if family is OTHER and config.get_text_config() is not config:
        raise UnsupportedError(f"{where}: {NO_FAMILY.format(config.model_type)}")
    text = config.get_text_config()
    _check_sections(text, (getattr(text, "rope_parameters", None) or {}).get("mrope_section"), where)
    if family.unwritten:
        _check_layers(config, family, where)
        _check_decoder(config, where)
    return family


def _check_sections(config: Any, section: Any, where: str) -> None:
    """UnsupportedError if the parts of a head that turn by time, rows and columns, the `mrope_section` of a text
    `config` or of transformers' class, are not all of what turns: torch fails at them, and vLLM has its own ways."""
    rope = getattr(config, "rope_parameters", None) or {}
    if section is None or hasattr(config, "qk_rope_head_dim"):  # of which a part of the head turns
        return
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(head * (rope.get("partial_rotary_factor") or 1.0)) // 2
    whole = isinstance(section, list | tuple) and all(isinstance(each, int) and each >= 0 for each in section)
    if not whole or len(section) < _AXES or sum(section) != turned:
        told = f"{sum(section)} in all" if whole and len(section) >= _AXES else f"not {_AXES} counts"
        default = "" if "mrope_section" in rope else " by transformers' default"
        raise UnsupportedError(
            f"{where}: mrope_section of rope_parameters is {section!r}{default}, {told}: heads of {head} "
            f"numbers have {turned} frequencies, which it divides between time, rows and columns"
        )


def _says_sections(config: Any) -> bool:
    """Whether a text `config` itself has a `mrope_section`, of all layers or of a kind of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    return any("mrope_section" in each for each in (rope, *rope.values()) if isinstance(each, dict))


_AXES = 3
"""Time, rows and columns."""


def _check_decoder(config: Any, where: str) -> None:
    """UnsupportedError for layers that no decoder takes."""
    try:
        with contextlib.suppress(NotImplementedError):  # what counts tokens needs values
            decoder_of_sizes(config, "float32", "auto")
    except UnsupportedError:
        raise
    except Exception as error:  # of any type: transformers' own code runs as the trainer calls it
        first = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"{where}: the trainer cannot run its layers ({type(error).__name__}: {first})"
        ) from error


def _check_layers(config: Any, family: Family, where: str) -> None:
    """UnsupportedError if transformers has no language model for `config`, or one that `family`, of an architecture of
    which nothing is written, does not describe: without its decoder, layers or LM head, or with routed experts or
    convolutions."""
    kind, path = config.model_type, family.decoder_path
    try:
        model = without_values(config, family)
    except ValueError as error:
        first = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"{where}: transformers makes no language model of model_type {kind!r}: {first}"
        ) from None
    try:
        for needed in (f"{path}.layers", HEAD):
            model.get_submodule(needed)
    except AttributeError as error:
        raise UnsupportedError(
            f"{where}: model_type {kind!r} is not supported: in transformers the model needs its layers at "
            f"{path}.layers and its LM head at lm_head ({error})"
        ) from None
    if not isinstance(model.lm_head, torch.nn.Linear):
        found = type(model.lm_head).__name__
        raise UnsupportedError(
            f"{where}: model_type {kind!r} is not supported: its lm_head is a {found}, and no linear layer that gives "
            "logits"
        )
    if getattr(config.get_text_config(), "max_position_embeddings", None) is None:
        raise UnsupportedError(
            f"{where}: model_type {kind!r} is not supported: its config has no max_position_embeddings, the longest "
            "sequence that it takes"
        )
    decoder = model.get_submodule(path)
    for module in decoder.modules():
        section = getattr(module, "mrope_section", None)
        _check_sections(config.get_text_config(), section, where)
        if section is not None and family.vision is not None and not _says_sections(config.get_text_config()):
            raise UnsupportedError(
                f"{where}: rope_parameters has no mrope_section; transformers takes {section!r} by default, and vLLM, "
                "which has none, turns heads by the place in the prompt alone"
            )
    for name, module in decoder.named_modules(prefix=path):
        if isinstance(module, torch.nn.Conv1d) and not is_short_conv(model.get_submodule(name.rpartition(".")[0])):
            raise UnsupportedError(
                f"{where}: model_type {kind!r} is not supported: {name} is a convolution along the sequence, and the "
                "trainer computes several sequences in one row"
            )
    for name, parameter in decoder.named_parameters(prefix=path):
        owner = model.get_submodule(name.rpartition(".")[0])
        if parameter.dim() == 3 and not isinstance(owner, torch.nn.Conv1d) and family.lora.experts is None:
            known = ", ".join(each for each, family in sorted(FAMILIES.items()) if family.lora.experts)
            raise UnsupportedError(
                f"{where}: model_type {kind!r} is not supported: {name.rpartition('.')[0]} has {len(parameter)} routed "
                f"experts, which adapters do not train in this architecture; mixtures of experts are served with "
                f"model_type {known}"
            )
    if hasattr(decoder, "embed_tokens_per_layer"):
        raise UnsupportedError(
            f"{where}: model_type {kind!r} is not supported: its layers read embeddings of tokens beside "
            f"{path}.embed_tokens, where the trainer begins"
        )


def check_weights(path: str, config: Any, family: Family) -> None:
    """UnsupportedError in a sentence if the files of the model at `path` do not have the tensors of its class, all of
    them and no others. Reads headers alone. A model whose weights are not on this machine yet passes."""
    if (folder := folder_of(path)) is None:
        return
    try:
        model = without_values(config, family)
    except Exception as error:  # of any type: its fields are not checked before
        raise UnsupportedError(f"{path}: {_not_a_model(error)}") from error
    by_text = family.unwritten and family.vision is not None
    check_files(
        model, folder, bool(getattr(config.get_text_config(), "tie_word_embeddings", False)) if by_text else None
    )


def config_of(path: str) -> Any:
    """transformers' config of the model at `path`; UnsupportedError in a sentence if it cannot be read.

    For some models vLLM registers other config classes, which lack what transformers' models read. Without what it says
    of fewer bits, which `published_of` reads: transformers would load such weights in other ways.
    """
    try:
        found = transformers.AutoConfig.from_pretrained(path)
        own = getattr(transformers, CONFIG_MAPPING_NAMES.get(found.model_type, ""), type(found))
        found = found if type(found) is own else own.from_pretrained(path)
        forget_quantization(found)
        return found
    except Exception as error:  # of any type, as above
        raise UnsupportedError(f"{path}: {_not_a_model(error)}") from error


def _not_a_model(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    if "trust_remote_code" in str(error):
        return (
            "its config.json names code in its folder (auto_map), and this server runs no code that comes with a model"
        )
    return f"transformers makes no model of its config.json ({type(error).__name__}: {first})"


def tower_of_sizes(config: Any, dtype: str) -> VisionTower | FoundTower | None:
    """The same of the vision tower."""
    family = family_of(config.model_type, config.name_or_path)
    return None if family.vision is None else _tower(without_values(config, family, dtype), family.vision)


def _tower(model: Any, vision: Vision) -> VisionTower | FoundTower:
    return FoundTower(model, vision) if vision.by_processor else VisionTower(model, vision)


def without_values(config: Any, family: Family, dtype: str = "float32") -> Any:
    """transformers' model of `config` on torch's meta device: shapes and no values."""
    with torch.device("meta"):
        auto_class = getattr(transformers, family.auto_class)
        # On this device grouped products, which are the default, take bfloat16 alone.
        model = auto_class.from_config(deepcopy(config), dtype=DTYPES[dtype], experts_implementation="batched_mm")
    return model.eval().requires_grad_(False)


def load_model(settings: TrainerConfig, row_ranks: RowRanks = ONE_HAS_ALL) -> LoadedModel:
    """Load the model that `settings` name, with the class of its family.

    With `shards`, or several `row_ranks`, all ranks load at the same time. Raises UnsupportedError if the family or the
    architecture is not supported.
    """
    path = settings.model
    config = config_of(path)
    family = family_of(config.model_type, path)
    try:
        published = published_of(path)
    except UnknownMethodError as error:
        raise UnsupportedError(f"{error}; {family.quantized}") from error
    if (published is not None) != (settings.weights == WEIGHTS):
        raise ValueError(f"{path}: its weights are {'' if published else 'not '}published in fewer bits")
    if settings.shards > 1 and family.vision is not None and family.vision.found:
        raise UnsupportedError(
            f"{path}: a model that reads images and has no family here is compared with transformers' whole forward, "
            f"and cannot be divided over {settings.shards} ranks"
        )
    if settings.shards > 1 and family.undivided:
        raise UnsupportedError(f"{path}: {family.undivided}, and cannot be divided over {settings.shards} ranks")
    make = maker_of(settings.weights, shards=settings.shards, experts=family.lora.experts is not None)
    if settings.head_weights != DENSE and settings.shards > 1:
        raise UnsupportedError(
            f"an LM head in {settings.head_weights} cannot be divided over {settings.shards} ranks: only a dense one "
            "can"
        )
    text_config = config.get_text_config()
    place = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = DTYPES[settings.dtype or ("bfloat16" if place.type == "cuda" else "float32")]
    with stage("weights"):
        model, weights, shared = _load(settings, config, family, chosen, place)
    own = text_config.max_position_embeddings
    max_positions = min(settings.max_context_length or own, own)
    _fix_frequencies(model.get_submodule(family.decoder_path), max_positions)
    if family.vision is not None and not family.vision.whole_images and not family.vision.found:
        use_packed_attention(model.get_submodule(family.vision.tower))
    kernels = kernels_for(place, chosen)
    with stage("decoder compared"):
        decoder = make_decoder(model, family, kernels, settings.decoder, path, weights, row_ranks, max_positions, make)
        head = (make if settings.head_weights == DENSE else packed)([model.lm_head])
        if weights is RESIDENT:
            _compare_head(head, model.lm_head, path)
    return LoadedModel(
        model=model,
        decoder=decoder,
        head=head,
        tower=None if family.vision is None else _tower(model, family.vision),
        weights=weights,
        kernels=kernels,
        logit_rule=logit_rule(model, family, path),
        family=family,
        vocab_size=model.lm_head.out_features,
        max_positions=max_positions,
        dtype=chosen,
        device=place,
        shared=shared,
    )


@torch.no_grad()
def _compare_head(head: FrozenMatrix, module: torch.nn.Linear, where: str) -> None:
    """UnsupportedError unless `head` multiplies as transformers' LM head does, before its bias."""
    x = torch.linspace(-1, 1, 2 * head.inputs, dtype=head.dtype, device=head.device).view(2, -1)
    ours, theirs = head.times(x).double(), plain_product(module, x).double()
    difference, norm = float((ours - theirs).norm()), float(theirs.norm())
    allowed = tolerance_of(head.dtype)
    if not difference <= allowed * norm:
        raise UnsupportedError(
            f"{where}: what its LM head gives differs from transformers' by {difference / norm if norm else 1:.2g} of "
            f"its norm; allowed is {allowed}"
        )


def _load(
    settings: TrainerConfig, config: Any, family: Family, dtype: torch.dtype, device: torch.device
) -> tuple[Any, LargeWeights, SharedMatrices | None]:
    """transformers' model, frozen, where its large weights are, and those that a sampler reads too."""
    path = settings.model
    if settings.shards > 1:
        from tinker_local.backend.training.parallel.load_sharded import load_sharded

        return *load_sharded(path, config, family, dtype, device, settings.shards), None
    if settings.weights == WEIGHTS:
        model, info = load_published(path, type(without_values(config, family)), config, dtype)
    else:
        model, info = getattr(transformers, family.auto_class).from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError(
            f"{path}: adapter_config.json belongs to an adapter, which transformers has added to the model's weights; "
            "remove it from the model's folder"
        )
    check_found(model, path, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    model = model.eval().requires_grad_(False)
    complete_logits(model, family, path)
    if settings.weights in BITS:
        with stage("packed"):
            pack_decoder(model.get_submodule(family.decoder_path), settings.weights, device)
    if settings.head_weights != DENSE:
        with stage("packed"):
            pack_vocabulary(model, settings.head_weights, device)
    shared = None
    if settings.shared_weights is not None:
        with stage("shared"):
            try:
                names = functools.partial(places_in_files, source=path)
                shared = share_matrices(model, path, device, settings.shared_weights, names)
            except CannotShareError as error:
                refuse(settings.shared_weights, str(error))
                raise
            torch.cuda.empty_cache()  # of the files' matrices, which were compared
    model = model.to(device)
    with stage("numbers checked"):
        check_finite(model, path, folder_of(path))
    return model, RESIDENT, shared


def _fix_frequencies(modules: Any, max_positions: int) -> None:
    """Make the rotary frequencies of the decoder `modules` constant: those for sequences of up to `max_positions`.

    transformers chooses them in each forward by its longest sequence ("longrope"), so that a sequence would depend on
    the others in its packed row. vLLM chooses by its configured length. ("dynamic" frequencies change only beyond the
    model's own length.)
    """
    rotary = getattr(modules, "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", None)
    if rotary is None or kinds is None:
        return
    for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind == "longrope":
            name = "inv_freq" if layers is None else f"{layers}_inv_freq"
            place = getattr(rotary, name).device
            found, _ = ROPE_INIT_FUNCTIONS[kind](rotary.config, place, seq_len=max_positions, layer_type=layers)
            rotary.register_buffer(name, found, persistent=False)
    rotary.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
