"""`python -m tinker_local.backend.exporting.llama_cpp_program WHAT ...`: what other libraries do with a GGUF file, in a
process that a fault in them may end.

- `logprobs FILE IDS.json ANSWER.json`: llama-cpp-python's logprobs (float64, nats) of each token after the first.
- `quantize FILE NEW TYPE`: llama.cpp's quantiser, by its function in llama-cpp-python. `--help` lists the types.
- `compare FILE MODEL ANSWER.json`: the matrices of a file that was converted beside those of MODEL, a folder.
- `difference FILE PLAIN ANSWER.json`: the matrices of a quantised file beside those of the one that it was made of.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROWS = 4096
"""How many rows of a matrix are compared at once."""

Array = npt.NDArray[Any]


def logprobs(file: Path, ids_file: Path, answer: Path) -> None:
    """On the CPU, with keys and values in float32."""
    llama_cpp: Any = import_module("llama_cpp")
    ids = json.loads(ids_file.read_text())
    model = llama_cpp.Llama(
        str(file),
        n_ctx=len(ids) + 8,
        n_batch=len(ids),
        n_ubatch=len(ids),
        n_gpu_layers=0,
        logits_all=True,
        type_k=0,  # GGML_TYPE_F32
        type_v=0,
        flash_attn=False,
        verbose=False,
    )
    model.eval(ids)
    logits = np.asarray(model.scores[: len(ids) - 1], np.float64)
    logits -= logits.max(-1, keepdims=True)
    found = logits[np.arange(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(-1))
    answer.write_text(json.dumps(found.tolist()))


def quantize(source: Path, file: Path, kind: str) -> None:
    """By `llama_model_quantize`."""
    import ctypes

    llama_cpp: Any = import_module("llama_cpp")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _file_types()[kind]
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params))
    if status != 0:
        sys.exit(f"llama_model_quantize ended with status {status}")


def _file_types() -> dict[str, int]:
    llama_cpp: Any = import_module("llama_cpp")
    starts = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")
    names = [(name, start) for name in vars(llama_cpp) for start in starts if name.startswith(start)]
    return {name.removeprefix(start): getattr(llama_cpp, name) for name, start in names}


def compare(file: Path, model: Path, answer: Path) -> None:
    """Counts of matrices and numbers, and the first that differ in shape or by more than their type rounds.

    The converter may move the rows of a matrix (it does for rotary embeddings), so rows are compared as a set: by their
    products with a fixed vector, sorted. Where it moves columns too, by all their numbers, sorted. It also splits,
    stacks and rewrites some tensors: those have other names in the file, and are counted as not compared.
    """
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(str(file))
    arch = str(reader.fields["general.architecture"].contents())
    blocks = int(reader.fields[f"{arch}.block_count"].contents())
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, blocks)
    inside = {tensor.name: tensor for tensor in reader.tensors}
    compared: set[str] = set()
    wrong: list[str] = []
    for name, source in _matrices(model):
        called = names.get_name(name.replace("language_model.", ""), try_suffixes=(".weight", ".bias"))
        if called not in inside:
            continue
        tensor = inside[called]
        shape = [int(size) for size in reversed(tensor.shape)]
        if shape != list(source.shape):
            wrong.append(f"{called} has the shape {shape}, and {name} has {list(source.shape)}")
            continue
        compared.add(called)
        found = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        allowed = _rounding(source, tensor.tensor_type.name)
        if not _same(source, found, allowed):
            wrong.append(f"{called} ({tensor.tensor_type.name}) has other numbers than {name}")
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    told = {
        "tensors": len(reader.tensors),
        "matrices": len(matrices),
        "compared": len(compared),
        "numbers": sum(int(tensor.n_elements) for tensor in matrices),
        "numbers_compared": sum(int(inside[name].n_elements) for name in compared),
        "wrong": wrong,
    }
    answer.write_text(json.dumps(told))


def _matrices(model: Path) -> Iterator[tuple[str, Array]]:
    """The matrices [out, in] in the safetensors files of a folder, as float32."""
    from safetensors import safe_open

    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            for name in names:
                if len(opened.get_slice(name).get_shape()) == 2:
                    yield name, opened.get_tensor(name).float().numpy()


def _rounding(source: Array, kind: str) -> float:
    """How far a number of `source` may be from its place in a file of this type: nothing where it has the bits for it;
    else half a step of bfloat16 or float16, or half a step of Q8_0, whose steps are a 127th of the largest number of a
    block and are rounded to float16 themselves."""
    largest = float(np.abs(source).max(initial=0.0))
    if kind == "BF16":
        return largest * 2.0**-8 if (source.view(np.uint32) & 0xFFFF).any() else 0.0
    if kind == "F16":
        return largest * 2.0**-11 + 2.0**-25
    if kind == "Q8_0":
        return largest * (0.5 / 127 + 2.0**-11) + 127 * 2.0**-25
    return 0.0


def _same(source: Array, found: Array, allowed: float) -> bool:
    """Whether each number of `found` is within `allowed` of one of `source`, with its rows in any order."""
    vector: Array = np.random.Generator(np.random.Philox(7)).uniform(0.5, 1.5, (source.shape[1],))

    def products(matrix: Array) -> Array:
        starts = range(0, len(matrix), ROWS)
        return np.sort(np.concatenate([matrix[at : at + ROWS].astype(np.float64) @ vector for at in starts]))

    # Sorting never takes two lists further apart than they were at their largest distance.
    largest: Array = np.abs(source).max(axis=0, initial=0.0)
    summed = float(largest @ vector)
    slack = allowed * vector.sum() + 2.0**-40 * summed  # a float64 sum rounds below that
    if np.abs(products(source) - products(found)).max(initial=0.0) <= slack:
        return True
    return bool(np.abs(np.sort(source, None) - np.sort(found, None)).max(initial=0.0) <= allowed)


def difference(file: Path, plain: Path, answer: Path) -> None:
    """How far the numbers of a quantised file moved, and the tensors that moved by more than their bits allow: root
    mean squares of the differences, relative to the numbers'."""
    gguf: Any = import_module("gguf")
    before, after = ({tensor.name: tensor for tensor in gguf.GGUFReader(str(each)).tensors} for each in (plain, file))
    wrong = [f"{name} is in one of both files" for name in sorted(before.keys() ^ after.keys())]
    kinds: dict[str, int] = {}
    total = squares = 0.0
    for name in sorted(before.keys() & after.keys()):
        old, new = before[name], after[name]
        kind = str(new.tensor_type.name)
        kinds[kind] = kinds.get(kind, 0) + 1
        if list(old.shape) != list(new.shape):
            wrong.append(f"{name} has the shape {list(new.shape)} instead of {list(old.shape)}")
            continue
        apart, size = _squares(*(np.ravel(gguf.dequantize(each.data, each.tensor_type)) for each in (old, new)))
        total, squares = total + apart, squares + size
        relative, allowed = math.sqrt(apart / size if size else apart), uniform_noise(_bits(kind))
        if not relative <= allowed:
            wrong.append(f"{name} ({kind}) moved by {relative:.2g} of its numbers' size, and may by {allowed:.2g}")
    told = {"all": math.sqrt(total / squares) if squares else 0.0, "kinds": kinds, "wrong": wrong}
    answer.write_text(json.dumps(told))


def _squares(numbers: Array, moved: Array) -> tuple[float, float]:
    """The sums of squares of the difference and of the numbers."""
    apart = float(np.square(numbers - moved, dtype=np.float64).sum())
    return apart, float(np.square(numbers, dtype=np.float64).sum())


def uniform_noise(bits: int) -> float:
    """The most that rounding to 2**bits even steps moves numbers, relative to their root mean square, where each block
    of 32 has steps from minus to plus its largest number.

    The step is 2 m / 2**bits for a largest number m, which is at most sqrt(32) root mean squares of the block, and
    rounding to even steps has a root mean square of step / sqrt(12): a bound on the shape of the numbers, which is far
    above what ordinary weights have (about a third of it) and far below 1 from 3 bits on.
    """
    return 2 * math.sqrt(32) / math.sqrt(12) * math.exp2(-bits)


def _bits(kind: str) -> int:
    """Of each number in a type of this name, without those of the scales: Q4_1 has 4, BF16 has 16."""
    found = re.search(r"\d+", kind)
    assert found is not None, f"{kind} names its bits"
    return int(found[0])


def main(arguments: list[str]) -> None:
    """Run what the first argument names."""
    what, *further = arguments
    if what == "quantize" and further in (["--help"], []):
        print("\n".join(_file_types()))
    elif what == "quantize":
        quantize(Path(further[0]), Path(further[1]), further[2])
    else:
        doing: Callable[[Path, Path, Path], None] = {
            "logprobs": logprobs,
            "compare": compare,
            "difference": difference,
        }[what]
        doing(*map(Path, further))


if __name__ == "__main__":
    main(sys.argv[1:])
