"""llama.cpp's own converter and quantiser: where they are, and how they run. None of GGUF's format is written here."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tinker_local.types import InternalError, InvalidRequestError

CONVERTED = ("f32", "f16", "bf16", "q8_0")
"""The types that the converter writes. All others are made of one of these by the quantiser."""

SCRIPT, PACKAGE = "convert_hf_to_gguf.py", "convert_hf_to_gguf"
COMMANDS = (SCRIPT, "convert-hf-to-gguf", PACKAGE)
"""How packages of llama.cpp call the converter in the PATH."""

QUANTISER = "llama-quantize"
PROGRAM = "tinker_local.backend.exporting.llama_cpp_program"
CHECKOUT = "git clone https://github.com/ggml-org/llama.cpp"

_TYPE = re.compile(r"[a-z0-9_]+")


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """`convert`: the converter's command, without arguments; `further`: what its environment has besides ours.
    `quantize`: the quantiser's command, if one was found: it takes a file, a new file and a type. `called`: what was
    found, in words."""

    convert: tuple[str, ...]
    quantize: tuple[str, ...] | None
    called: str
    further: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Of each of its processes. No file of a model's folder needs a hub."""
        return {**os.environ, **self.further, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

    def write(self, model: Path, file: Path, kind: str, name: str, *options: str) -> None:
        """Have the converter write the model in the folder `model` into the new `file`, in one of CONVERTED.

        InvalidRequestError, with the converter's own last words, if it does not.
        """
        arguments = [str(model.absolute()), "--outfile", str(file.absolute()), "--outtype", kind]
        arguments += ["--model-name", name, *options]
        said = self._run([*self.convert, *arguments], model.parent)
        if said is not None or not file.is_file():
            raise InvalidRequestError(f"--to gguf: llama.cpp's converter ({self.called}) refuses the model: {said}")

    def requantize(self, source: Path, file: Path, kind: str) -> None:
        """Have the quantiser write `source` into the new `file` as `kind`, with the quantiser's words if it fails."""
        assert self.quantize is not None, "find_llama_cpp refuses a type that nothing here makes"
        files = str(source.absolute()), str(file.absolute())  # it runs in another folder
        said = self._run([*self.quantize, *files, kind.upper()], source.parent)
        if said is not None or not file.is_file():
            raise InvalidRequestError(f"--gguf-type {kind}: llama.cpp's quantiser ({self.quantize[0]}) failed: {said}")

    def ended(self, command: Sequence[str], folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """A command of llama.cpp after it has run, in `folder`; `stdout` has all that it printed."""
        return subprocess.run(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def _run(self, command: Sequence[str], folder: Path) -> str | None:
        """What it said last if it failed; None if it did not."""
        done = self.ended(command, folder)
        if done.returncode == 0:
            return None
        lines = [line.strip() for line in done.stdout.replace("\r", "\n").splitlines() if line.strip()]
        if not lines:
            return f"it ended with status {done.returncode}"
        bare = lines[-1].isidentifier()  # an AssertionError without a word, below the line that raised it
        return f"{lines[-1]}, {lines[-2]}" if bare and len(lines) > 1 else lines[-1]


def find_llama_cpp(folder: Path | None, kind: str) -> LlamaCpp:
    """The converter, and a quantiser if `kind` needs one: in `folder`, a checkout of llama.cpp, if it is given; else in
    the PATH or among the packages of this environment. InvalidRequestError, with what to do, if there is none."""
    if not _TYPE.fullmatch(kind):
        raise InvalidRequestError(f"--gguf-type: {kind!r} is not a type of llama.cpp, such as bf16, q8_0 or q4_k_m")
    found = _in_path() if folder is None else _in_folder(folder)
    if found is None:
        raise InvalidRequestError(_how_to_get_it(kind))
    if kind not in CONVERTED and found.quantize is None:
        raise InvalidRequestError(
            f"--gguf-type {kind}: the converter ({found.called}) writes {', '.join(CONVERTED)}, and no {QUANTISER} was "
            "found for other types: build llama.cpp (cmake -B build && cmake --build build --target llama-quantize) "
            "and name its folder with --llama-cpp, or pip install llama-cpp-python, which has it as a function"
        )
    if kind not in CONVERTED and found.quantize is not None:
        _check_type(found, kind)
    return found


def _in_folder(folder: Path) -> LlamaCpp:
    script = folder / SCRIPT
    if not script.is_file():
        raise InvalidRequestError(
            f"--llama-cpp {folder}: has no {SCRIPT}; name the folder of llama.cpp's source ({CHECKOUT})"
        )
    places = [folder / "build" / "bin", folder / "bin", folder]
    built = [place / QUANTISER for place in places if (place / QUANTISER).is_file()]
    readers = folder / "gguf-py"
    further = {"PYTHONPATH": os.pathsep.join([str(readers.absolute()), *sys.path])} if readers.is_dir() else {}
    quantiser = (str(built[0].absolute()),) if built else _quantiser()
    return LlamaCpp((sys.executable, str(script.absolute())), quantiser, str(script), further)


def _in_path() -> LlamaCpp | None:
    for command in COMMANDS:
        if (path := shutil.which(command)) is not None:
            return LlamaCpp((path,), _quantiser(), path)
    if find_spec(PACKAGE) is not None:
        return LlamaCpp((sys.executable, "-m", PACKAGE), _quantiser(), f"the package {PACKAGE}")
    return None


def _quantiser() -> tuple[str, ...] | None:
    """In the PATH, or the function of llama-cpp-python."""
    if (path := shutil.which(QUANTISER)) is not None:
        return (path,)
    return None if find_spec("llama_cpp") is None else (sys.executable, "-m", PROGRAM, "quantize")


def _check_type(found: LlamaCpp, kind: str) -> None:
    """InvalidRequestError if the quantiser does not list `kind`: it is asked before anything is merged."""
    assert found.quantize is not None
    done = found.ended([*found.quantize, "--help"])
    listed = set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\bF16\b|\bF32\b", done.stdout))
    if not listed:
        last = done.stdout.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise InternalError(f"{found.quantize[0]} --help lists no type: {last[0]}")
    if kind.upper() not in listed:
        some = ", ".join(sorted(each.lower() for each in listed))
        raise InvalidRequestError(f"--gguf-type: {kind!r} is not a type of {found.quantize[0]}, which has {some}")


def _how_to_get_it(kind: str) -> str:
    plain = kind if kind in CONVERTED else "bf16"
    commands = [
        "tinker-local export CHECKPOINT merged --to merged",
        f"python llama.cpp/{SCRIPT} merged --outfile model.gguf --outtype {plain}",
        f"{QUANTISER} model.gguf model-q4_k_m.gguf Q4_K_M",
    ]
    return (
        f"--to gguf: llama.cpp's converter is neither in the PATH nor in a package ({PACKAGE}) here; get it with "
        f"`{CHECKOUT}` and give --llama-cpp llama.cpp, or run the three commands yourself: `"
        + "`, `".join(commands)
        + "`"
    )
