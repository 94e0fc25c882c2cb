"""Divides a GPU's memory between a trainer and a vLLM engine before either is loaded. Imports neither torch nor vLLM.

Both hold the model's weights, or one copy of them together. Of the rest, the trainer gets what a full micro-batch
needs without recomputation, but at most half; the KV cache gets the remainder, but no more than its sequences can
fill. A GPU that has one of them alone gives it everything.

Layers with a sliding window or with linear attention keep little of a sequence. vLLM then divides its cache into blocks
that layers of all kinds share (`kv_cache_utils.py`, the same in 0.26 and 0.32). With linear attention it refuses to
start if a step may have more sequences than there are blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from tinker_local.backend.options import MICRO_BATCH_TOKENS, HeadPrecision, Precision
from tinker_local.backend.sampling.sampler import RESERVED
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.backend.training.run.block_memory import CUDA_LOGITS, attention_widths, exchange_bytes
from tinker_local.backend.weights.precision import BITS, PIECE, Bits, Packable

if TYPE_CHECKING:
    from tinker_local.backend.training.run.block_memory import TowerSizes
    from tinker_local.backend.training.run.recompute_policy import ActivationMemory

_GIB = 2**30
_PAGE = 16
"""vLLM's blocks are multiples of so many positions."""
_VOCABULARY_STEP = 64
"""vLLM has embeddings and LM heads of multiples of so many rows."""
_RUNTIME = 7 * _GIB // 4
"""CUDA contexts of two processes (0.61 GiB each on an H200), and what the driver takes for kernels and CUDA graphs
(0.55), by `benchmarks/memory_by_stage.py`. `spare_bytes` is left beside it."""
GATHERED = 3
"""Whole layers that a rank of a sharded trainer has memory for: the one that runs, the next one, and, if NCCL gathers
them, the same as it is received."""
COUNTED_RANK = 32
"""The largest rank of these adapters."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Maximum sequences and positions in one step of vLLM."""

    sequences: int = 256
    positions: int = 2048


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model. `parameters`: of the whole model. `q_width`, `kv_width`: heads times head size. `itemsize`:
    bytes per number. The others describe the language model's layers. `intermediate`: of all experts together, if the
    layers have experts, and of a shared one. `chosen`: experts of a position, of `expert_width` each. `sliding`: of the
    `layers`, those that attend to `window` positions; `linear`: those with linear attention, each with `state_bytes`
    for a sequence. `packable`: what of the layers can be in fewer bits, and is in `packed_bits`, if those are not 0;
    `packable_head` and `head_bits`: the same of embedding and LM head. `tower`: of the vision tower, if adapters train
    it. `doubled`: numbers that vLLM has once more, and would not have from the trainer's matrices. `route_bytes`: of
    the number of an expert, as the sampler keeps it."""

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    q_width: int
    kv_width: int
    vocabulary: int
    itemsize: int
    chosen: int = 0
    expert_width: int = 0
    sliding: int = 0
    window: int = 0
    linear: int = 0
    state_bytes: int = 0
    packable: Packable | None = None
    packed_bits: Bits | Literal[0] = 0
    packable_head: Packable | None = None
    head_bits: Bits | Literal[0] = 0
    tower: "TowerSizes | None" = None
    doubled: int = 0
    route_bytes: int = 1

    @property
    def weight_bytes(self) -> int:
        packed = [(self.packable, self.packed_bits), (self.packable_head, self.head_bits)]
        spared = sum(each.numbers * self.itemsize - each.bytes(bits) for each, bits in packed if each and bits)
        return self.parameters * self.itemsize - spared

    @property
    def unpacked_bytes(self) -> int:
        """Of the largest packed matrix, two joined ones, while one multiplies by it, with half as much that making it
        takes, and of two pieces of an embedding or LM head, one that is made while the one before is still there; in
        each engine. vLLM multiplies by experts as it reads their codes."""
        of_layers = 3 * self.packable.largest if self.packed_bits and self.packable else 0
        of_head = 2 * min(PIECE, self.packable_head.largest) if self.head_bits and self.packable_head else 0
        return (of_layers + of_head) * self.itemsize

    @property
    def unpacked_in_trainer(self) -> int:
        """The same in the trainer, which makes all experts of a layer at once, in one pass."""
        stack = self.packable.stack * self.itemsize if self.packed_bits and self.packable else 0
        return max(self.unpacked_bytes, stack)

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        return self.hidden * (2 * self.q_width + 2 * self.kv_width + 3 * self.intermediate)

    @property
    def unshared_bytes(self) -> int:
        """Of matrices that the sampler has a copy of although it reads the trainer's: dense ones of a vocabulary that
        vLLM adds rows to, and keys that it takes for values, too. Vectors, which both have, are small."""
        padded = self.vocabulary % _VOCABULARY_STEP and not self.head_bits
        return (self.doubled + (2 * self.vocabulary * self.hidden if padded else 0)) * self.itemsize

    def trainer_bytes(self, ranks: int) -> int:
        """Weights on one of `ranks` that share the layers: its part of them, `GATHERED` whole ones, and all else. An
        untied LM head is shared, too, and has memory to be received whole, where it is larger than a layer."""
        layers = self.layers * self.layer_parameters
        if ranks == 1 or layers > self.parameters:
            return self.weight_bytes
        shard = -(-layers // ranks) + min(GATHERED, self.layers) * self.layer_parameters
        head = self.vocabulary * self.hidden
        received = (
            -(-head // ranks) + max(0, head - self.layer_parameters) if self.parameters - layers > 2 * head else 0
        )
        return (self.parameters - layers + shard + received) * self.itemsize

    def sequence_bytes(self, context: int, positions: int) -> int:
        """Of the KV cache that holds one sequence of `context`, where a step has up to `positions`, as vLLM counts."""
        # Positions leave a window when their step has ended, and two steps are under way.
        seen = min(context, self.window - 1 + 2 * positions)
        blocks = self._kinds(self._full) * self._blocks(context)
        if self.sliding:
            blocks += self._kinds(self.sliding) * (self._blocks(seen) + 1)
        # The state, and the one at the end of the last block, from which a later prompt may go on.
        blocks += 2 * self._kinds(self.linear)
        return (blocks + 1) * self.block_bytes  # vLLM leaves one block empty

    @property
    def block_bytes(self) -> int:
        """Of a block of the KV cache, which some layers of one kind share. Its positions take as much memory as the
        states of as many layers with linear attention."""
        return self._shared * self._positions * self._position_bytes

    @property
    def routes_share(self) -> float:
        """What the experts of positions take, beside the part of the KV cache that has their keys and values."""
        return self.layers * self.chosen * self.route_bytes / (self._shared * self._position_bytes)

    def states_bytes(self, sequences: int) -> int:
        """Of the smallest KV cache with which vLLM starts if a step may have `sequences` and `RESERVED` more. 0 without
        linear attention."""
        return (sequences + RESERVED) * self.block_bytes if self.linear else 0

    def sequences_with_states(self, kv_cache: int, wanted: int) -> int:
        """`wanted`, or fewer if `kv_cache` bytes are too few for vLLM to start with these; at least one."""
        return max(1, min(wanted, kv_cache // self.block_bytes - RESERVED)) if self.linear else wanted

    @property
    def _full(self) -> int:
        """Layers that keep all of a sequence."""
        return self.layers - self.sliding - self.linear

    @property
    def _position_bytes(self) -> int:
        """Of a layer's keys and values of one position."""
        return 2 * self.kv_width * self.itemsize

    @property
    def _positions(self) -> int:
        """Of a block: a multiple of `_PAGE`."""
        return max(_PAGE, _round_up(-(-self.state_bytes // self._position_bytes), _PAGE))

    def _blocks(self, positions: int) -> int:
        return -(-positions // self._positions)

    @property
    def _shared(self) -> int:
        """How many layers of one kind share a block."""
        kinds = [count for count in (self._full, self.sliding, self.linear) if count]
        return max(kinds) if max(kinds) < 1.5 * min(kinds) else min(kinds)

    def _kinds(self, layers: int) -> int:
        """How many blocks `layers` of one kind take for the same positions."""
        return -(-layers // self._shared)

    def adapter_parameters(self, rank: int) -> int:
        """Of an adapter with that rank on all projections, the LM head, and the vision tower if that is trained."""
        widths = 6 * self.hidden + 2 * self.q_width + 2 * self.kv_width + 3 * self.intermediate
        of_tower = 0 if self.tower is None else self.tower.widths
        return rank * (self.layers * widths + self.hidden + self.vocabulary + of_tower)

    def step_bytes(self, step: StepSize) -> int:
        """Of one step of vLLM: a layer's activations, and logits, probabilities and noise in float32."""
        # Each expert of a position has its own copy of the hidden state, before and after.
        mlp = self.chosen * (4 * self.expert_width + 2 * self.hidden) if self.chosen else 4 * self.intermediate
        layer = step.positions * (mlp + 8 * self.hidden) * self.itemsize
        return layer + 3 * step.sequences * self.vocabulary * 4


@dataclass(frozen=True, slots=True)
class Reserves:
    """What is set aside besides weights, activations and KV cache. `adapters`: that train, of `COUNTED_RANK` at most;
    more of them take memory from activations, which are then recomputed. `adapter_slots`: of vLLM, for adapters of
    the largest rank in one step. `image_cache`: bytes of image features, in both engines each. `logits`: numbers that
    exist at a time, in both engines. `micro_batch_tokens`: positions in one forward of the trainer, unless they are
    chosen. `step`: of vLLM; None: what suits the card."""

    adapters: int = 4
    adapter_slots: int = 4
    image_cache: int = 2**30
    logits: int = CUDA_LOGITS
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    step: StepSize | None = None

    def steps(self, total: int, name: str) -> Sequence[StepSize]:
        """Steps for a card of `total` bytes, the largest first: by default vLLM's server takes the same."""
        if self.step is not None:
            return (self.step,)
        if total >= 70 * _GIB and "a100" not in name.lower():
            return (StepSize(1024, 8192), StepSize())
        return (StepSize(),)

    def __str__(self) -> str:
        return (
            f"for adapters that are sampled in one step: {self.adapter_slots}, for image features: "
            f"{self.image_cache >> 20} MiB, for a micro-batch: {self.micro_batch_tokens:,} positions"
            + ("" if self.step is None else f", for sequences that are sampled at a time: {self.step.sequences}")
        )


USUAL = Reserves()
SMALLER = (
    Reserves(2, 2, image_cache=2**28, logits=2**27, micro_batch_tokens=4096),
    Reserves(1, 1, image_cache=2**27, logits=2**27, micro_batch_tokens=4096),
    Reserves(1, 1, image_cache=2**27, logits=2**26, micro_batch_tokens=4096, step=StepSize(64, 2048)),
    Reserves(1, 1, image_cache=2**27, logits=2**26, micro_batch_tokens=2048, step=StepSize(16, 1024)),
)
"""For GPUs whose memory is short for `USUAL`, in their order."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """`step` of vLLM. Bytes: `kv_cache` for vLLM, and `activations`, the trainer's limit without weights, adapters and
    logits; 0 for what is not on the GPU; `spare`, which both leave to others. `micro_batch_tokens`: positions in one
    forward of the trainer."""

    step: StepSize
    kv_cache: int
    activations: int
    micro_batch_tokens: int
    spare: int


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of routed experts."""
_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts")
"""And of those that a position takes."""


def spare_bytes(free: int) -> int:
    """Of a GPU with `free` bytes, what engines leave to others at any moment."""
    return min(_GIB, free // 64)


def model_sizes(
    config: Mapping[str, Any],
    parameters: int,
    itemsize: int,
    packable: Packable | None = None,
    precision: Precision | None = None,
    packable_head: Packable | None = None,
    head_precision: HeadPrecision | None = None,
) -> ModelSizes:
    """Sizes from the fields of a text config of transformers, with what is `packable` in `precision`, and embedding and
    LM head in `head_precision`."""
    q_width, kv_width = attention_widths(config)
    experts = next((config[name] for name in _EXPERTS if config.get(name)), 0)
    # gpt-oss has no other name for the width of an expert.
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    several = config.get("n_shared_experts") or config.get("moe_num_shared_experts") or 0
    beside = config["intermediate_size"] if config.get("enable_moe_block") else 0
    shared = config.get("shared_expert_intermediate_size") or several * width or beside
    kinds: Sequence[str] = config.get("layer_types") or ()
    window = config.get("sliding_window") or 0
    return ModelSizes(
        parameters=parameters,
        hidden=config["hidden_size"],
        intermediate=experts * width + shared if experts else config["intermediate_size"],
        layers=config["num_hidden_layers"],
        q_width=q_width,
        kv_width=kv_width,
        vocabulary=config["vocab_size"],
        itemsize=itemsize,
        chosen=next(config[name] for name in _CHOSEN if config.get(name)) if experts else 0,
        expert_width=width if experts else 0,
        sliding=kinds.count("sliding_attention") if window else 0,
        window=window if "sliding_attention" in kinds else 0,
        linear=kinds.count("linear_attention"),
        packable=packable,
        packed_bits=BITS[precision] if precision else 0,
        packable_head=packable_head,
        head_bits=BITS[head_precision] if head_precision else 0,
        state_bytes=_state_bytes(config, itemsize) if "linear_attention" in kinds else 0,
        doubled=_doubled(config),
        route_bytes=RoutedLayers((), 0, experts).dtype.itemsize,
    )


def _doubled(config: Mapping[str, Any]) -> int:
    """Numbers of the keys' matrices that vLLM has as values as well, and of a second embedding that it adds rows to."""
    found = 0
    if config.get("attention_k_eq_v"):
        own = {int(layer): fields for layer, fields in (config.get("per_layer_config") or {}).items()}
        kinds = config["layer_types"][: config["num_hidden_layers"] - (config.get("num_kv_shared_layers") or 0)]
        full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        layers = [{**config, **own.get(number, {}), "per_layer_config": None} for number in full]
        found += config["hidden_size"] * sum(attention_widths(layer)[1] for layer in layers)
    second = config.get("hidden_size_per_layer_input") or 0
    rows = config.get("vocab_size_per_layer_input") or 0
    return found + (second * config["num_hidden_layers"] * rows if rows % _VOCABULARY_STEP else 0)


def _state_bytes(config: Mapping[str, Any], itemsize: int) -> int:
    """Of a layer of GatedDeltaNet: a matrix for each head of values, and the last inputs of its convolution."""
    keys, values = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    channels = 2 * keys * key + values * value
    of_matrix = 4 if config.get("mamba_ssm_dtype") == "float32" else itemsize
    return values * key * value * of_matrix + channels * (int(config["linear_conv_kernel_dim"]) - 1) * itemsize


def plan_gpu(
    sizes: ModelSizes,
    activations: "Callable[[int], ActivationMemory]",
    *,
    free: int,
    context: int,
    micro_batch_tokens: int,
    max_rank: int,
    adapter_slots: int,
    steps: Sequence[StepSize],
    image_cache: int,
    logits: int,
    adapters: int = USUAL.adapters,
    kv_cache: int | None = None,
    ranks: int = 1,
    sample_ranks: int = 1,
    context_parallel: int = 1,
    trains: bool = True,
    samples: bool = True,
    shared: bool = False,
) -> GpuPlan:
    """Divide `free` bytes of a GPU, with the first of `steps` that fits; for a model with linear attention, with that
    which then has the most sequences. `activations`: what the trainer's decoder takes for a micro-batch of so
    many positions. `context`: the longest sequence, in positions; `adapter_slots` of `max_rank`: vLLM's;
    `image_cache`, `logits`: bytes of image features and of logits that exist at a time, in both engines each;
    `adapters`: that train; `kv_cache`: its size if it is given. `trains`, `samples`: whether the GPU has a
    trainer, one of `ranks` that share the layers, and one of `context_parallel` that compute a micro-batch
    together; and a sampler, one of `sample_ranks` with a part of every layer; at least one of them. `shared`:
    they read one copy of the weights. `kv_cache`, here and in the plan, is the part on this GPU.

    Raises ValueError with the numbers if the KV cache, of one sequence at least, and one sequence in the trainer do not
    fit with the last of `steps`.
    """
    # Weights, gradient and two moments in float32, and A, B and their gradients stacked for a micro-batch.
    adapter = sizes.adapter_parameters(min(max_rank, COUNTED_RANK))
    trained_adapters = adapters * adapter * 4 * 4 + adapter * (2 * sizes.itemsize + 4 * 2)
    weights = sizes.trainer_bytes(ranks)
    trainer = weights + trained_adapters + 2 * logits + image_cache + sizes.unpacked_in_trainer if trains else 0
    slots = adapter_slots * sizes.adapter_parameters(max_rank) * sizes.itemsize
    sampled = sizes.unshared_bytes if shared else -(-sizes.weight_bytes // sample_ranks)
    sampler = sampled + slots + logits + image_cache + sizes.unpacked_bytes if samples else 0

    longest = min(-(-context // context_parallel), micro_batch_tokens)
    least, most = activations(longest).always, activations(micro_batch_tokens).everything
    if context_parallel > 1:
        exchanged = exchange_bytes(sizes.q_width, sizes.kv_width, sizes.itemsize)
        least, most = least + longest * exchanged, most + micro_batch_tokens * exchanged
    if sizes.tower is not None and trains:
        trainer += micro_batch_tokens * sizes.tower.kept
        # Its backward begins when the decoder's activations are gone.
        least = max(least, longest * sizes.tower.backward)
        most = max(most, micro_batch_tokens * sizes.tower.backward)
    if not trains:
        least = most = 0
    # One that is given and too small is the caller's to refuse.
    least_states = sizes.states_bytes(1) // sample_ranks if kv_cache is None else 0
    found: list[GpuPlan] = []
    spare = spare_bytes(free)
    # Of the first rank of a replica, which keeps the experts of all positions, beside its share of the cache.
    routes = sizes.routes_share * sample_ranks
    for step in steps:
        one_sequence = -(-sizes.sequence_bytes(context, step.positions) // sample_ranks)
        least_kv = (max(one_sequence, least_states) if kv_cache is None else kv_cache) if samples else 0
        left = free - _RUNTIME - spare - sampler - trainer - (sizes.step_bytes(step) if samples else 0)
        least_kept = int(least_kv * (1 + routes))
        if left < least + least_kept:
            continue
        if not samples:
            return GpuPlan(step, 0, left, micro_batch_tokens, spare)
        trained = min(max(least, min(most, left // 2)), left - least_kept)
        most_kv = max(least_kv, step.sequences * one_sequence) if kv_cache is None else kv_cache
        cache = max(least_kv, min(int((left - trained) / (1 + routes)), most_kv))
        rest = left - cache - int(cache * routes)
        sequences = sizes.sequences_with_states(cache * sample_ranks, step.sequences)
        found.append(
            GpuPlan(replace(step, sequences=sequences), cache, rest if trains else 0, micro_batch_tokens, spare)
        )
    if found:
        return max(found, key=lambda plan: plan.step.sequences)  # the first of those with as many
    of_trainer = f"the activations of {longest} positions ({_gib(least)})"
    of_sampler = f"a KV cache for one sequence of {context} positions ({_gib(least_kv)})"
    if trains and samples:
        copies = f"{_gib(weights)} each" if weights == sampled else f"{_gib(weights)} and {_gib(sampled)}"
        parts = f"the weights ({_gib(weights)})" if shared else f"two copies of the weights ({copies})"
        what = f"{of_sampler} and {of_trainer}"
    else:
        parts, what = (
            f"the weights ({_gib(weights if trains else sampled)})",
            of_sampler if samples else of_trainer,
        )
    less = "a smaller max_context_length, micro_batch_tokens or max_rank needs less"
    if trains and samples:
        less += "; so does a GPU for each (--sample-gpus)"
    if samples:
        less += "; so do more GPUs for each replica (--sample-tp)"
    if trains:
        less += "; so do more GPUs that train and share the layers (--train-gpus, --shard)"
    raise ValueError(
        f"{_gib(free)} of GPU memory are free, but {parts}, adapters, buffers and {what} take "
        f"{_gib(free - left + least + least_kv)}; {less}"
    )


def _round_up(number: int, step: int) -> int:
    """To a multiple of `step`."""
    return -(-number // step) * step


def _gib(number: int) -> str:
    return f"{number / _GIB:.1f} GiB"
