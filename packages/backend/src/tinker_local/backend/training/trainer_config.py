"""What a trainer is made of. Imports neither torch nor transformers."""

from dataclasses import dataclass

from tinker_local.backend.options import DecoderChoice

TRAINERS_IMAGES = 2**28
"""Bytes of image features that a trainer keeps unless told otherwise."""


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """The settings of an `HFTrainer` of the model at `model`, under the name `name`.

    `dtype`: of weights and activations, "float32", "bfloat16" or "float64" (default: bfloat16 on CUDA, else float32);
    adapters, gradients and optimizer states are float32 (float64 with float64). `max_context_length` can only shorten
    the model's own. `micro_batch_tokens`: maximum positions in one forward, but for a datum that is longer; temporarily
    fewer when memory runs out.
    `activation_memory_bytes`: limit for activations; layers beyond it are recomputed in the backward. None: on CUDA
    what a full micro-batch takes, so that a longer sequence takes no more; on the CPU nothing is recomputed.
    `logit_chunk_elements`: maximum number of logits in memory at once (None: 2^28 on CUDA, 2^26 elsewhere).
    `image_cache_bytes`: limit for image features cached on the device. `spare_bytes`: of a GPU, left to others at any
    moment. `module_gradient_norms`: `optim_step` also reports the norm of each module. `decoder`: runs the layers;
    "auto" means "written-out" if it supports them, else "autograd". `weights`: the kind of frozen matrices in layers
    and LM head, of `weights/kinds.py`. `head_weights`: "int8" if embedding and LM head are in 8 bits, whatever the
    layers are in; else "dense". `shards`: how many ranks, in a row, hold one copy of the layers and of an untied LM
    head together, each a part; 1: all are whole on each. `context_parallel`: how many ranks, in a row, share each
    micro-batch, which then has as many times `micro_batch_tokens`. `share_prefixes`: what data of a request begin with
    is computed once. `shared_weights`: the address of a `MemoryHolder` that gets the matrices, for a sampler on the
    same device; None: they are this trainer's alone. `replay_routes`: the experts that data name are taken.
    """

    model: str
    name: str
    dtype: str | None = None
    device: str | None = None
    max_context_length: int | None = None
    micro_batch_tokens: int = 8192
    max_rank: int = 128
    activation_memory_bytes: int | None = None
    logit_chunk_elements: int | None = None
    image_cache_bytes: int = TRAINERS_IMAGES
    spare_bytes: int = 2**30
    module_gradient_norms: bool = False
    decoder: DecoderChoice = "auto"
    weights: str = "dense"
    head_weights: str = "dense"
    shards: int = 1
    context_parallel: int = 1
    share_prefixes: bool = True
    shared_weights: str | None = None
    replay_routes: bool = True
