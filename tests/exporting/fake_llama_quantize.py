"""A fake of llama.cpp's quantiser, for tests: `FILE NEW TYPE`, for Q8_0 and Q4_0 alone, which the package gguf has."""

import sys

import gguf

TYPES = {"Q8_0": gguf.GGMLQuantizationType.Q8_0, "Q4_0": gguf.GGMLQuantizationType.Q4_0}


def main() -> None:
    if sys.argv[1:] == ["--help"]:
        print("usage: fake\n   7  or  Q8_0\n   2  or  Q4_0\n   3  or  Q4_1")
        sys.exit(1)  # as the real one does
    source, new, kind = sys.argv[1:]
    if kind not in TYPES:
        print("main: failed to quantize model", file=sys.stderr)
        sys.exit(1)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(new, "qwen3")
    writer.add_block_count(1)
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if array.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(array, TYPES[kind]), raw_dtype=TYPES[kind])
        else:
            writer.add_tensor(tensor.name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
