"""`export --to gguf` around llama.cpp's converter and quantiser, with fakes of both: what it gives them, what it checks
of their files, and what it says. `test_gguf_by_llama_cpp.py` has the real ones."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tinker_local.backend.exporting import export_checkpoint, llama_cpp
from tinker_local.backend.exporting.llama_cpp import find_llama_cpp
from tinker_local.types import InternalError, InvalidRequestError

from tests.exporting.conftest import Tuned

Make = Callable[..., Tuned]
HERE = Path(__file__).parent


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A folder as llama.cpp's source is, with the fakes."""
    folder = tmp_path / "llama.cpp"
    (folder / "build" / "bin").mkdir(parents=True)
    shutil.copy(HERE / "fake_convert_hf_to_gguf.py", folder / "convert_hf_to_gguf.py")
    quantiser = folder / "build" / "bin" / "llama-quantize"
    quantiser.write_text(f"#!{sys.executable}\n{(HERE / 'fake_llama_quantize.py').read_text()}")
    quantiser.chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def without_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fakes write is not a model that llama.cpp could load, also where its library is installed."""
    from tinker_local.backend.exporting import check_gguf

    found = importlib.util.find_spec
    for module in (check_gguf, llama_cpp):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == "llama_cpp" else found(name))


@pytest.mark.more
def test_a_fake_converter_gives_a_file_with_the_merged_numbers_and_a_modelfile(
    tuned: Make, tmp_path: Path, llama_folder: Path
) -> None:
    trained = tuned("qwen3")
    base = str(tmp_path / "base")
    shutil.copytree(trained.model, base)
    (tmp_path / "base" / "tokenization_own.py").write_text("raise SystemExit('code of a model ran')\n")
    exported = export_checkpoint(trained.checkpoint, tmp_path / "o", to="gguf", base=base, llama_cpp=llama_folder)
    assert {file.name for file in (tmp_path / "o").iterdir()} == {"model-f32.gguf", "Modelfile", "README.md"}
    assert exported.gguf is not None
    assert exported.gguf.checked is not None
    assert exported.checked is not None
    assert exported.checked.library == "transformers"  # of what the converter read
    assert "llama-cpp-python is not installed" in exported.found
    export_checkpoint(trained.checkpoint, tmp_path / "m", to="merged", base=base, check=False)
    merged = load_file(tmp_path / "m" / "model.safetensors")
    reader = gguf.GGUFReader(tmp_path / "o" / "model-f32.gguf")
    assert len(reader.tensors) == len(merged)
    written = {tensor.name: tensor.data for tensor in reader.tensors}
    assert np.array_equal(written["output.weight"], merged["lm_head.weight"].numpy())  # which was trained
    assert not np.array_equal(written["output.weight"], written["token_embd.weight"])
    assert reader.fields["general.name"].contents() == "o"
    card = (tmp_path / "o" / "README.md").read_text()
    assert "library_name: gguf" in card
    assert "llama-server -m model-f32.gguf" in card
    assert exported.found in card
    assert (tmp_path / "o" / "Modelfile").read_text().splitlines()[1] == "FROM ./model-f32.gguf"


@pytest.mark.more
@pytest.mark.parametrize(
    ("fault", "kind", "error", "words"),
    [
        ("refuses", None, InvalidRequestError, "refuses the model: ERROR:fake:Model FakeForCausalLM is not supported"),
        ("wrong", None, InternalError, r"\(F32\) has other numbers than"),
        ("wrong", "f16", InternalError, r"\(F16\) has other numbers than"),
    ],
)
def test_what_a_fake_converter_does_wrong_is_said_and_not_kept(
    tuned: Make,
    tmp_path: Path,
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    kind: str | None,
    error: Any,
    words: str,
) -> None:
    trained = tuned("qwen3")
    monkeypatch.setenv("FAKE_CONVERTER", fault)
    with pytest.raises(error, match=words):
        export_checkpoint(
            trained.checkpoint,
            tmp_path / "o",
            to="gguf",
            base=str(trained.model),
            llama_cpp=llama_folder,
            gguf_type=kind,
        )
    assert [file.name for file in tmp_path.iterdir()] == ["llama.cpp"]


@pytest.mark.more
def test_a_fake_quantiser_makes_the_type_of_the_plain_file(tuned: Make, tmp_path: Path, llama_folder: Path) -> None:
    trained = tuned("qwen3")
    given: dict[str, Any] = {"to": "gguf", "base": str(trained.model), "llama_cpp": llama_folder}
    exported = export_checkpoint(trained.checkpoint, tmp_path / "o", gguf_type="Q4_0", **given)
    assert sorted(file.name for file in (tmp_path / "o").iterdir()) == ["Modelfile", "README.md", "model-q4_0.gguf"]
    assert "q4_0 moves numbers by " in exported.found
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "o" / "model-q4_0.gguf").tensors}
    assert kinds == {"F32", "Q4_0"}
    with pytest.raises(InvalidRequestError, match=r"quantiser .* failed: main: failed to quantize model"):
        export_checkpoint(trained.checkpoint, tmp_path / "p", gguf_type="q4_1", **given)
    assert not (tmp_path / "p").exists()


def test_a_type_that_the_fake_quantiser_does_not_list_is_refused_before_anything_is_merged(llama_folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"'q4_9' is not a type of .*, which has q4_0, q4_1, q8_0"):
        find_llama_cpp(llama_folder, "q4_9")
    with pytest.raises(InvalidRequestError, match=r"'q4 k' is not a type of llama.cpp, such as"):
        find_llama_cpp(llama_folder, "q4 k")
    assert find_llama_cpp(llama_folder, "q4_0").quantize == (str(llama_folder / "build" / "bin" / "llama-quantize"),)
    shutil.rmtree(llama_folder / "build")
    assert find_llama_cpp(llama_folder, "q8_0").quantize is None  # which the converter writes itself
    with pytest.raises(InvalidRequestError, match=r"no llama-quantize was found for other types: build llama.cpp"):
        find_llama_cpp(llama_folder, "q4_0")


def test_a_folder_relative_to_here_reaches_programs_that_run_elsewhere_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = "import pathlib, sys; pathlib.Path(sys.argv[{}]).write_bytes(pathlib.Path(sys.argv[1], '{}').read_bytes())"
    convert, quantize = ((sys.executable, "-c", copy.format(*each)) for each in ((3, "weights"), (2, "")))
    found = llama_cpp.LlamaCpp(convert, quantize, "a fake")
    (tmp_path / "out" / "merged").mkdir(parents=True)
    (tmp_path / "out" / "merged" / "weights").write_text("numbers")
    monkeypatch.chdir(tmp_path)
    found.write(Path("out/merged"), Path("out/model-f32.gguf"), "f32", "name")
    found.requantize(Path("out/model-f32.gguf"), Path("out/model-q4_0.gguf"), "q4_0")
    assert (tmp_path / "out" / "model-q4_0.gguf").read_text() == "numbers"


def test_without_a_converter_the_three_commands_are_said_on_fakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError) as caught:
        find_llama_cpp(None, "q8_0")
    said = str(caught.value)
    assert "\n" not in said
    for command in (
        "`tinker-local export CHECKPOINT merged --to merged`",
        "`python llama.cpp/convert_hf_to_gguf.py merged --outfile model.gguf --outtype q8_0`",
        "`llama-quantize model.gguf model-q4_k_m.gguf Q4_K_M`",
    ):
        assert command in said
    with pytest.raises(InvalidRequestError, match=r"has no convert_hf_to_gguf.py; name the folder of llama.cpp's"):
        find_llama_cpp(tmp_path, "q8_0")
    monkeypatch.setattr(llama_cpp, "find_spec", lambda name: object() if name == "convert_hf_to_gguf" else None)
    assert find_llama_cpp(None, "bf16").convert == (sys.executable, "-m", "convert_hf_to_gguf")
    fake = tmp_path / "convert-hf-to-gguf"
    fake.write_text("#!/bin/sh\n")
    fake.chmod(0o755)
    assert find_llama_cpp(None, "bf16").convert == (str(fake),)
    assert os.environ["PATH"] == str(tmp_path)


def test_its_options_are_refused_with_another_target(tmp_path: Path, tuned: Make) -> None:
    trained = tuned("qwen3")
    for given in ({"llama_cpp": tmp_path}, {"gguf_type": "bf16"}):
        with pytest.raises(InvalidRequestError, match="--to merged: --llama-cpp and --gguf-type are for --to gguf"):
            export_checkpoint(trained.checkpoint, tmp_path / "o", to="merged", base=str(trained.model), **given)
