"""Compile the Triton kernels for GPUs that are not here: Triton brings CUDA's compiler, which needs no driver.

The server's own functions launch them, with tensors on the CPU in the shapes of real models, so that block sizes,
warps, stages and dtypes are those of a run. A launch ends when its kernel is compiled. Run as a program, this file
prints what the kernels take at most on each card:

    python tests/training/kernels_on_cards.py
"""

import contextlib
import importlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker_local.backend
import torch
from tinker_local.backend.models.fitting import SHAPES
from tinker_local.backend.training.kernels import triton_experts
from tinker_local.backend.training.kernels.kernels import ACTIVATIONS
from tinker_local.backend.training.kernels.triton_experts import TritonExperts
from tinker_local.backend.training.kernels.triton_kernels import TritonKernels
from tinker_local.backend.training.lora.lora_batch import LowRank, Owners
from tinker_local.backend.vllm_engine.lora_kernels import FEW_ROWS, RANKS_AT_ONCE, Rows, Tables, expand, shrink
from tinker_local.backend.vllm_engine.one_pass_draw import draw
from tinker_local.backend.weights.precision import group_of
from tinker_local.backend.weights.triton_codes import times_few, unpacked
from tinker_local.backend.weights.triton_experts_codes import Blocks, times_experts


@dataclass(frozen=True, slots=True)
class Card:
    """`capability`: 89 is sm_89; `shared`: bytes that a block of threads may have (CUDA's programming guide, "Technical
    Specifications per Compute Capability")."""

    capability: int
    shared: int
    names: str


CARDS = {
    card.capability: card
    for card in (
        Card(80, 163 * 1024, "A100"),
        Card(86, 99 * 1024, "RTX 3090, A40, A10"),
        Card(89, 99 * 1024, "RTX 4090, L4, L40S"),
        Card(90, 227 * 1024, "H100, H200"),
        Card(100, 227 * 1024, "B200"),
        Card(120, 99 * 1024, "RTX 5090, RTX PRO 6000"),
    )
}

REGISTERS = 64 * 1024
"""Of a multiprocessor: all threads of a block together have no more, on every card."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """`shared`: bytes of a block of threads; `registers` and `spilled` (bytes written to memory for want of registers):
    of a thread."""

    kernel: str
    shared: int
    registers: int
    spilled: int
    warps: int


@dataclass(slots=True, eq=False)
class Compiler:
    """`kernels`: what was compiled; `seen`: full names of all functions of Triton that it took."""

    card: Card
    kernels: list[Compiled] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)


class Driver:
    """What Triton asks of a GPU's driver before it compiles."""

    numbers = itertools.count(1000)

    def __init__(self, card: Card) -> None:
        # Kernels stay in Triton's memory by the number of a device.
        self._card, self._number = card, next(self.numbers)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._card.capability, 32)

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(card: Card, folder: Path) -> Iterator[Compiler]:
    """Within, launches compile for `card` and run nothing: what they return has no values. `folder`, empty, is Triton's
    cache."""
    import triton
    from triton.compiler.code_generator import CodeGenerator
    from triton.runtime.jit import JITFunction

    compiler, launch, call = Compiler(card), JITFunction.run, CodeGenerator.call_JitFunction

    def compile_only(function: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            kernel = launch(function, *args, grid=grid, warmup=True, **settings)
        compiler.seen.add(_name(function))
        if printed.getvalue():  # Otherwise an earlier launch was the same.
            compiler.kernels.append(_compiled(function.__name__, kernel.metadata, printed.getvalue()))
        return kernel

    def note(generator: Any, function: Any, *args: Any, **settings: Any) -> Any:
        compiler.seen.add(_name(function))
        return call(generator, function, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        patch.setattr(triton.runtime.driver, "_active", Driver(card))
        patch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
        patch.setattr(JITFunction, "run", compile_only)
        patch.setattr(CodeGenerator, "call_JitFunction", note)
        patch.setattr(triton_experts, "shared_memory", lambda device: card.shared)
        yield compiler


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__name__}"


def _compiled(kernel: str, metadata: Any, log: str) -> Compiled:
    """Registers and spills are in what ptxas prints; Triton itself asks the driver for them."""
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spilled is not None, log
    return Compiled(kernel, metadata.shared, int(registers[1]), int(spilled[1]), metadata.num_warps)


def functions_of_triton() -> set[str]:
    """Full names of all of them in the server's modules."""
    from triton.runtime.jit import JITFunction

    (root,) = map(Path, tinker_local.backend.__path__)
    found = set[str]()
    for file in sorted(root.rglob("*.py")):
        if "triton" in file.read_text():
            name = ".".join((tinker_local.backend.__name__, *file.relative_to(root).with_suffix("").parts))
            module = importlib.import_module(name.removesuffix(".__init__"))
            found |= {_name(each) for each in vars(module).values() if isinstance(each, JITFunction)}
    return found


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder: hidden and intermediate size, heads of queries and of keys, their size and how many numbers of it
    rotate, experts that a token takes (0: none)."""

    hidden: int
    intermediate: int
    heads: tuple[int, ...]
    size: int
    rotary: int
    chosen: int = 0


LARGEST = Sizes(8192, 29568, (64, 8), 128, 128, 8)
"""The largest blocks that models of this server's families have."""

MODELS = [
    *(Sizes(s.hidden, s.intermediate, (s.heads, s.kv_heads), s.head_size, s.head_size) for s in SHAPES.values()),
    Sizes(2048, 768, (32, 4), 128, 128, 8),  # Qwen3-30B-A3B
    Sizes(4096, 1536, (64, 4), 128, 128, 8),  # Qwen3-235B-A22B
    Sizes(2880, 2880, (64, 8), 64, 64, 4),  # gpt-oss
    Sizes(4096, 12288, (16, 4), 256, 64),  # Qwen3.5-9B
    Sizes(3840, 15360, (16, 8), 256, 256),  # Gemma-3-12B
    LARGEST,
]

EXPERT_WIDTH = 1536
EXPERTS = 128
TOKENS = 4096
VOCABULARY = 151_936


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def launch_decoder(sizes: Sizes) -> None:
    """What a layer launches, forward and backward."""
    kernels = TritonKernels()
    x = new(2, sizes.hidden)
    for weight in (new(sizes.hidden), new(sizes.hidden, dtype=torch.float32)):
        kernels.rms_norm(x, weight, 1e-6)
        for residual in (None, x):
            kernels.rms_norm_backward(x, x, weight, 1e-6, residual)
    cos = new(2, sizes.rotary)
    for heads, norm in itertools.product(sizes.heads, (None, new(sizes.size))):
        rows = new(2, heads, sizes.size)
        kernels.norm_rope(rows, norm, 1e-6, cos, cos)
        kernels.norm_rope_backward(rows, rows, norm, 1e-6, cos, cos, rows)
    for activation in ACTIVATIONS:
        kernels.glu(new(2, 2 * sizes.intermediate), activation)
        kernels.glu_backward(new(2, sizes.intermediate), new(2, 2 * sizes.intermediate), activation)
    if sizes.chosen:
        width = min(sizes.intermediate, 2 * EXPERT_WIDTH)
        places, scores = new(2, sizes.chosen, dtype=torch.int64), new(2, sizes.chosen)
        rows = new(2 * sizes.chosen, sizes.hidden)
        kernels.routed_swiglu_backward(new(2, width), new(2, 2 * width), new(2))
        kernels.weighted_sum(rows, places, scores)
        kernels.weighted_sum(rows, places, None)
        kernels.spread(x, places)


def launch_head() -> None:
    kernels, logits = TritonKernels(), new(2, VOCABULARY)
    kernels.scaled_softmax(logits, kernels.logsumexp(logits), new(2, dtype=torch.float32))


def launch_experts(rank: int, *, several: bool, chosen: int = 8) -> None:
    """A layer of experts with one adapter of `rank`, or with `several`: two."""
    kernels, single = TritonExperts(), torch.float32
    owners = 2 if several else 1
    ranks = owners * max(16, rank)
    whose = new(TOKENS, dtype=torch.int64) if several else None
    others = new(TOKENS, ranks, dtype=torch.bool) if several else None
    owned = Owners(new(owners, 2, dtype=torch.int32), rank, whose, others)
    places, rows = kernels.sort(new(TOKENS, chosen, dtype=torch.int64), whose, EXPERTS, owners)
    first = LowRank(
        new(2 * ranks, 32),
        (new(EXPERTS, EXPERT_WIDTH, ranks),) * 2,
        owned,
        new(2 * ranks, 32, dtype=single),
        (new(EXPERTS, EXPERT_WIDTH, ranks, dtype=single),) * 2,
    )
    second = LowRank(
        new(EXPERTS, ranks, EXPERT_WIDTH),
        (new(32, ranks),),
        owned,
        new(EXPERTS, ranks, EXPERT_WIDTH, dtype=single),
        (new(32, ranks, dtype=single),),
    )
    pairs = TOKENS * chosen
    gate_up, h, scores = new(pairs, 2 * EXPERT_WIDTH), new(TOKENS, 2, ranks), new(TOKENS, chosen)
    _, found = kernels.activate(gate_up, h, rows, first, second)
    kernels.sum_columns(found, places, scores, second)
    grads = kernels.backward(new(pairs, EXPERT_WIDTH), gate_up, h, new(TOKENS, ranks), scores, rows, first, second)
    kernels.sum_columns(grads[2], places, None, first)


def launch_draw() -> None:
    """A token from logits as vLLM may give them."""
    for dtype in (torch.bfloat16, torch.float32):
        draw(new(2, VOCABULARY, dtype=dtype), new(2, dtype=torch.float32), 7)


def launch_lora(rank: int) -> None:
    """The sampler's LoRA of few rows and of many, in parts and whole."""
    for (width, widths), rows in itertools.product(((4096, (4096, 1024)), (12288, (4096,))), (1, FEW_ROWS + 1, 8192)):
        a = [new(4, 1, rank, width) for _ in widths]
        b = [new(4, 1, each, rank) for each in widths]
        of_rows = Rows(*(new(count, dtype=torch.int32) for count in (rows, rows, 5, 6, 5, 4)))
        h = shrink(new(rows, width), a, of_rows, Tables())
        expand(new(rows, sum(widths)), h, b, widths, of_rows, Tables())


def launch_codes(inputs: int) -> None:
    """A matrix of 8 and of 4 bits, whole and in products with few rows."""
    largest = group_of(inputs, 8)
    assert largest is not None
    for group, (width, dtype) in itertools.product((largest, 32), ((inputs, torch.int8), (inputs // 2, torch.uint8))):
        codes, scales = new(2, width, dtype=dtype), new(2, inputs // group)
        for zeros in (None, new(2, inputs // group, dtype=torch.int16)):
            unpacked(codes, scales, torch.bfloat16, zeros)
            for rows in (1, 16, 32, 64):
                times_few(new(rows, inputs), codes, scales, zeros)
        if dtype == torch.uint8:
            unpacked(codes, scales, torch.bfloat16, curved=True)
            for rows in (1, 32, 64):
                times_few(new(rows, inputs), codes, scales, curved=True)


def launch_expert_codes(inputs: int) -> None:
    """Products with packed experts, in blocks of all sizes."""
    largest = group_of(inputs, 8)
    assert largest is not None
    for group, (width, dtype) in itertools.product((largest, 32), ((inputs, torch.int8), (inputs // 2, torch.uint8))):
        codes, scales = new(EXPERTS, 2, width, dtype=dtype), new(EXPERTS, 2, inputs // group)
        for bias, scores in ((None, None), (new(EXPERTS, 2), new(TOKENS, 2, dtype=torch.float32))):
            for size in (16, 32, 64):
                pairs, experts, filled = (new(count, dtype=torch.int32) for count in (4 * size, 4, 1))
                blocks = Blocks(pairs, experts, filled, size)
                times_experts(
                    new(TOKENS, inputs),
                    codes,
                    scales,
                    blocks,
                    new(TOKENS, 2, 2),
                    bias,
                    scores,
                    curved=dtype == torch.uint8,
                )


def launch_each_once() -> None:
    """Each kernel, with its largest blocks."""
    launch_decoder(LARGEST)
    launch_head()
    launch_experts(TritonExperts.most_rank, several=True)
    launch_draw()
    launch_lora(RANKS_AT_ONCE)
    launch_codes(4096)
    launch_expert_codes(4096)


def launch_all() -> None:
    """Each kernel, for all models and ranks."""
    for sizes in MODELS:
        launch_decoder(sizes)
    launch_head()
    for rank, several in itertools.product((1, 16, 32, 64, 128), (False, True)):
        launch_experts(rank, several=several)
    launch_draw()
    for rank in (8, 32, 64, RANKS_AT_ONCE):
        launch_lora(rank)
    for inputs in (4096, 2880):  # groups of 128, and of 64: blocks are of their size, whatever the width
        launch_codes(inputs)
        launch_expert_codes(inputs)


def compiled_for(card: Card, launch: Callable[[], None], folder: Path) -> Compiler:
    with compiling_for(card, folder) as compiler:
        launch()
    return compiler


if __name__ == "__main__":
    import tempfile

    print("| card | kernels | shared memory of one, at most | of | registers of a thread | spilled bytes of a thread |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for each in CARDS.values():
        with tempfile.TemporaryDirectory() as cache:
            kernels = compiled_for(each, launch_all, Path(cache)).kernels
        most = max(kernels, key=lambda kernel: kernel.shared)
        spills = max(kernels, key=lambda kernel: kernel.spilled)
        print(
            f"| sm_{each.capability} | {len(kernels)} | {most.shared:,} ({most.kernel}) | {each.shared:,} "
            f"| {max(kernel.registers for kernel in kernels)} | {spills.spilled} ({spills.kernel}) |",
            flush=True,
        )
