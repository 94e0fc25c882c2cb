"""Generates `tinker_local/types/wire/*_pb2.{py,pyi}` from `proto/*.proto`.

    python packages/types/generate_proto.py           writes the files
    python packages/types/generate_proto.py --check   compares them with what is committed; exits 1 if they differ

Needs grpcio-tools (a development dependency), whose version decides which protobuf runtimes can load the result.
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
SOURCES = sorted((HERE / "proto").glob("*.proto"))
TARGET = HERE / "src" / "tinker_local" / "types" / "wire"


def generate(folder: Path) -> list[Path]:
    """Run protoc on the schemas; the files that it wrote into `folder`."""
    builtin_includes = str(files("grpc_tools") / "_proto")
    arguments = [f"-I{HERE / 'proto'}", f"-I{builtin_includes}", f"--python_out={folder}", f"--pyi_out={folder}"]
    if protoc.main(["protoc", *arguments, *map(str, SOURCES)]) != 0:
        sys.exit(f"protoc failed on {', '.join(source.name for source in SOURCES)}")
    return sorted(folder.glob("*_pb2.py*"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the protobuf classes of all schemas.")
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        for fresh in generate(Path(scratch)):
            committed = TARGET / fresh.name
            if not check:
                committed.write_bytes(fresh.read_bytes())
                print(f"wrote {committed}")
            elif not committed.is_file() or committed.read_bytes() != fresh.read_bytes():
                sys.exit(f"{committed} is not what the schemas give: run `make proto` and commit the result")


if __name__ == "__main__":
    main()
