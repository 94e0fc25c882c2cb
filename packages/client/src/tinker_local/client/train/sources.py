"""Where rows come from: JSON lines, Parquet, and data sets that the library `datasets` has saved.

Lines are found again by their places in the file, and Parquet and saved data sets are memory-mapped, so a data set may
be larger than the memory. Only a JSON array is held, as text.
"""

import json
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from tinker_local.client.train.examples import Problem
from tinker_local.types import InvalidRequestError
from tinker_local.types.errors import brief

Row: TypeAlias = Mapping[str, Any]

_SAVED, _SPLITS = "state.json", "dataset_dict.json"
"""Files that `datasets` writes into a folder that it saves: a data set, and several by the names of splits."""

_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?\.")
"""Names of files as the hub has them, which begin with the split."""

_READ_BYTES = 2**22
_BOM = b"\xef\xbb\xbf"


class RowError(Exception):
    """A row cannot be read; `problems` say why."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class Source(Protocol):
    """Rows by number, from 0. Any thread may call it, several at once."""

    folder: Path
    """The real folder of its files, which relative paths in rows begin at."""

    def __len__(self) -> int: ...

    def place(self, index: int) -> str:
        """The file and the line or row, counted from 1."""
        ...

    def row(self, index: int) -> Row:
        """Raises RowError."""
        ...


def open_source(path: Path) -> Source:
    """The rows of a file (`.jsonl`, `.json`, `.parquet`), of a data set that was saved with `save_to_disk`, or of a
    folder with files of one of these kinds.

    Raises InvalidRequestError for anything else.
    """
    if not path.exists():
        raise InvalidRequestError(f"data: there is no {path}")
    if path.is_file():
        return _open_file(path)
    if (path / _SPLITS).is_file():
        splits = sorted(part.parent.name for part in path.glob(f"*/{_SAVED}"))
        if len(splits) == 1:
            return _saved(path / splits[0])
        first = "train" if "train" in splits else [*splits, "?"][0]
        raise InvalidRequestError(
            f"data: {path} has the splits {', '.join(splits)}; name the folder of one, as {path / first}"
        )
    if (path / _SAVED).is_file():
        return _saved(path)
    files = sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".parquet"))
    if len({each.suffix for each in files}) != 1:
        found = ", ".join(each.name for each in files[:5]) or "none of them"
        deeper = sorted({str(each.parent) for kind in ("jsonl", "parquet") for each in path.glob(f"*/*.{kind}")})
        more = f"; {', '.join(deeper[:5])} has some" if deeper and not files else ""
        raise InvalidRequestError(
            f"data: a folder must hold a saved data set, or .jsonl files, or .parquet files; {path} has {found}{more}"
        )
    splits = sorted({match[1] for each in files if (match := _SHARD.match(each.name))})
    if len(splits) > 1:  # as a download from the hub has them: to train on all would be to train on the test
        raise InvalidRequestError(
            f"data: {path} has files of the splits {', '.join(splits)}; name one file, or a folder with those of one "
            "split"
        )
    return _open_file(files[0]) if len(files) == 1 else _Joined([_open_file(each) for each in files])


def _open_file(path: Path) -> Source:
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        with path.open("rb") as file:
            head = file.read(64)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise InvalidRequestError(f"data: {path.name} is in UTF-16, as PowerShell writes it; save it as UTF-8")
        if path.suffix == ".json" and head.removeprefix(_BOM).lstrip().startswith(b"["):
            return JsonArray(path)
        return JsonLines(path)
    if path.suffix in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        raise InvalidRequestError(
            f"data: {path.name} is compressed; unpack it first, since rows are read again and again at their places"
        )
    if path.suffix == ".parquet":
        return _parquet(path)
    raise InvalidRequestError(
        f"data: {path.name} must be .jsonl (a JSON object on each line), .json, .parquet, or a folder that datasets "
        "saved"
    )


class _Joined:
    """Several files, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._ends = np.cumsum([len(source) for source in sources])
        self.folder = sources[0].folder

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _at(self, index: int) -> tuple[Source, int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._sources[which], index - (int(self._ends[which - 1]) if which else 0)

    def place(self, index: int) -> str:
        source, at = self._at(index)
        return source.place(at)

    def row(self, index: int) -> Row:
        source, at = self._at(index)
        return source.row(at)


# JSON lines ----------------------------------------------------------------------------------------------------------


class JsonLines:
    """A file with a JSON object on each line, in UTF-8. Lines end with a line feed and with nothing else: U+2028 and
    the like are text. Lines of blanks are left out, and counted."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self.folder = path.resolve().parent
        self._file = path.open("rb")  # open as long as this is used: a new file of this name would have other lines
        weakref.finalize(self, self._file.close)
        self._state = self._state_now()
        self._ends = _line_ends(self._file.fileno())
        self._lines = np.array([line for line in range(len(self._ends)) if self._bytes(line).strip()], np.int64)
        if len(self._lines) and self._bytes(int(self._lines[0])).lstrip().startswith(b"["):
            raise InvalidRequestError(
                f"data: {self._name} begins with '[': it must have one JSON object a line, not an array of them; a "
                "file that is an array must be named .json"
            )

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, index: int) -> str:
        return f"{self._name} line {self._lines[index] + 1}"

    def row(self, index: int) -> Row:
        """Raises RowError for what is not a JSON object, or not exactly one reading of it; InvalidRequestError if the
        file has changed."""
        place = self.place(index)
        try:
            text = self._bytes(int(self._lines[index])).decode()
        except UnicodeDecodeError as error:
            raise RowError(Problem(place, "", f"byte {error.start} of the line is not UTF-8")) from None
        return _object(text, place, "the line")

    def _state_now(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _bytes(self, line: int) -> bytes:
        if self._state_now() != self._state:
            raise InvalidRequestError(f"data: {self._name} has changed since it was opened; start again")
        begin = int(self._ends[line - 1]) if line else 0
        found = os.pread(self._file.fileno(), int(self._ends[line]) - begin, begin)
        return (found if line else found.removeprefix(_BOM)).rstrip(b"\r\n")


class JsonArray:
    """A file that is one JSON array of objects, as Alpaca's and LLaVA's are published. Its text is held in memory, and
    an object is parsed when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self.folder = path.resolve().parent
        try:
            self._text = path.read_bytes().removeprefix(_BOM).decode()
            self._places = np.array(_elements(self._text), np.int64).reshape(-1, 2)
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"data: byte {error.start} of {self._name} is not UTF-8") from None
        except json.JSONDecodeError as error:
            raise InvalidRequestError(f"data: {self._name} is not JSON: {error}") from None
        except RecursionError:
            raise InvalidRequestError(f"data: {self._name}: arrays or objects are nested too deeply") from None

    def __len__(self) -> int:
        return len(self._places)

    def place(self, index: int) -> str:
        return f"{self._name} row {index + 1}"

    def row(self, index: int) -> Row:
        """Raises RowError for what is not an object, or not exactly one reading of it."""
        begin, end = map(int, self._places[index])
        return _object(self._text[begin:end], self.place(index), "the row")


_BLANKS = re.compile(r"[ \t\n\r]*")


def _elements(text: str) -> list[tuple[int, int]]:
    """Where each element of a JSON array begins and ends."""

    def behind_blanks(at: int) -> int:
        found = _BLANKS.match(text, at)
        return at if found is None else found.end()

    decoder = json.JSONDecoder()
    found: list[tuple[int, int]] = []
    at = behind_blanks(behind_blanks(0) + 1)
    while text[at : at + 1] != "]" or found:
        _, end = decoder.raw_decode(text, at)
        found.append((at, end))
        at = behind_blanks(end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        at = behind_blanks(at + 1)
    if behind_blanks(at + 1) < len(text):
        raise json.JSONDecodeError("Extra data behind the array", text, behind_blanks(at + 1))
    return found


def _object(text: str, place: str, what: str) -> Row:
    """RowError for what is not a JSON object, or not exactly one reading of it. `what`: of the file is the text."""
    try:
        found = json.loads(text, object_pairs_hook=unique_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RowError(Problem(place, "", f"not JSON: {error.msg} at character {error.pos + 1} of {what}")) from None
    except ValueError as error:
        raise RowError(Problem(place, "", str(error))) from None
    except RecursionError:
        raise RowError(Problem(place, "", "not readable: arrays or objects are nested too deeply")) from None
    if not isinstance(found, dict):
        raise RowError(Problem(place, "", f"must be a JSON object, not {brief(found)}"))
    return found


def _line_ends(descriptor: int) -> npt.NDArray[np.int64]:
    """The offset behind each line of a file."""
    ends, offset, last = [np.zeros(0, np.int64)], 0, b"\n"
    while data := os.pread(descriptor, _READ_BYTES, offset):
        ends.append(np.flatnonzero(np.frombuffer(data, np.uint8) == 10) + offset + 1)
        offset, last = offset + len(data), data[-1:]
    return np.concatenate([*ends, np.zeros(0, np.int64) if last == b"\n" else np.array([offset])])


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: ValueError if an object has a field twice, of which Python would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the field {brief(twice)} twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


# Arrow ---------------------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Source:
    # The library writes it once as Arrow into its cache, which is then memory-mapped.
    return _Arrow(
        _opened(path, lambda datasets: datasets.Dataset.from_parquet(str(path))), path.resolve().parent, path.name
    )


def _saved(path: Path) -> Source:
    return _Arrow(_opened(path, lambda datasets: datasets.Dataset.load_from_disk(str(path))), path.resolve(), path.name)


def _opened(path: Path, read: Callable[[Any], Any]) -> Any:
    """What the library reads of `path`; InvalidRequestError with its words if it does not, as for a file that is cut
    off, or has no rows."""
    datasets = _library()
    try:
        return read(datasets)
    except (ValueError, OSError, LookupError, TypeError, datasets.exceptions.DatasetsError) as error:
        raise InvalidRequestError(
            f"data: the library datasets cannot read {path}, or it has no rows: {error}"
        ) from error


def _library() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise InvalidRequestError(
            "data: Parquet and saved data sets need the library datasets: pip install datasets"
        ) from None
    return datasets


class _Arrow:
    """A `datasets.Dataset`. Its own decoders are not used: pictures stay bytes or paths, which `media.py` reads."""

    def __init__(self, data: Any, folder: Path, name: str) -> None:
        self._features = data.features
        self._data = data.with_format("arrow")
        self._name = name
        self.folder = folder

    def __len__(self) -> int:
        return len(self._data)

    def place(self, index: int) -> str:
        return f"{self._name} row {index + 1}"

    def row(self, index: int) -> Row:
        """Raises RowError where Arrow may have added a null to the arguments of a call."""
        (row,) = self._data[index : index + 1].to_pylist()
        try:
            return {name: _plain(value, self._features[name], name) for name, value in row.items() if value is not None}
        except _Ambiguous as error:
            raise RowError(Problem(self.place(index), str(error), _ADDED)) from None


_ADDED = (
    "is null, which Arrow also writes for fields that only other rows have; store arguments as JSON text, or in a "
    "column of the type Json"
)


class _Ambiguous(Exception):
    """The field of a null that the row or Arrow has written."""


def _plain(value: Any, feature: Any, field: str) -> Any:
    """A value as the row had it: without the nulls of fields that Arrow gives to all objects of a column, and with JSON
    that is stored as text."""
    if isinstance(feature, getattr(_library(), "Json", ())):  # which earlier versions do not have
        return json.loads(value) if isinstance(value, str) else value
    if isinstance(value, dict):
        inner = feature if isinstance(feature, Mapping) else {}
        if ".function.arguments" in field and None in value.values():
            raise _Ambiguous(f"{field}.{next(name for name, each in value.items() if each is None)}")
        return {
            name: _plain(each, inner.get(name), f"{field}.{name}") for name, each in value.items() if each is not None
        }
    if isinstance(value, list):
        inside = getattr(feature, "feature", None)
        return [_plain(each, inside, f"{field}[{at}]") for at, each in enumerate(value)]
    return value
