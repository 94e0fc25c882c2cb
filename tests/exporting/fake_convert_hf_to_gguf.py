"""A fake of llama.cpp's converter, for tests: it takes the same arguments, and writes the tensors as they are.

`FAKE_CONVERTER` of its environment makes it fail in a way: "refuses", or "wrong" (one number of one matrix).
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--outfile", required=True)
    parser.add_argument("--outtype", choices=["f32", "f16", "bf16", "q8_0"], required=True)
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--mmproj", action="store_true")
    asked = parser.parse_args()
    print("INFO: loading", file=sys.stderr)
    if (fault := os.environ.get("FAKE_CONVERTER")) == "refuses":
        print("ERROR:fake:Model FakeForCausalLM is not supported", file=sys.stderr)
        sys.exit(1)
    assert not [*asked.model.rglob("*.py")], "the real converter would run these"
    tensors = load_file(asked.model / "model.safetensors")
    layers = 1 + max(int(name.split("layers.")[1].split(".")[0]) for name in tensors if "layers." in name)
    writer = gguf.GGUFWriter(asked.outfile, "qwen3")
    writer.add_name(asked.model_name)
    writer.add_block_count(layers)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        array = tensor.float().numpy().copy()
        if fault == "wrong" and number == 3:
            array.reshape(-1)[17] += 0.25
        if array.ndim > 1:
            array = array.astype(DTYPES[asked.outtype])
        called = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None
        writer.add_tensor(called, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
