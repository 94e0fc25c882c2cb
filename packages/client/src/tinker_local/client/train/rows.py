"""A data set as rows to train on: all of it is read once, and every bad row is found before training begins."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tinker
from tinker_local.client.train.examples import BadRows, Example, Kind, Preference, Problem
from tinker_local.client.train.forms import Answered, Pair, kind_of, parse_row
from tinker_local.client.train.media import Media, MediaRules
from tinker_local.client.train.rendering import Answer, Begun, CannotRender, Renderer, examples_of
from tinker_local.client.train.sources import RowError, Source, open_source
from tinker_local.types import InvalidRequestError

TooLong: TypeAlias = Literal["refuse", "shorten"]
"""What becomes of a row that has too many tokens. "shorten" leaves out whole answers at its end, from the first that
does not fit, and the messages between them; an answer is never cut."""

ROWS_TOGETHER = 64
"""Rows whose tokens are made together."""

PICTURES_TOGETHER = 2**24
"""Bytes of the pictures of such rows, about."""


def read_rows(
    path: Path | str,
    *,
    renderer: Renderer,
    media: MediaRules | None = None,
    skip_bad: bool = False,
    most_tokens: int,
    too_long: TooLong = "refuse",
    progress: Callable[[int, int], None] | None = None,
) -> "FileRows":
    """The rows of `path`: see `sources.open_source` for what it may be, and `forms` for what a row may be.

    Each row is parsed and rendered once, its pictures too, so that what is wrong is known before training.
    `most_tokens`: positions of a datum with its last token. `progress`: called with the rows read so far, and all.

    Raises BadRows with every problem of every row, unless `skip_bad` leaves such rows out and some are left; and
    InvalidRequestError if there are no rows.
    """
    source = open_source(Path(path))
    if not len(source):
        raise InvalidRequestError(f"data: {path} has no rows")
    rows = FileRows(source, renderer, Media(media or MediaRules(), source.folder), most_tokens, too_long)
    rows.check(progress)
    if rows.skipped and not (skip_bad and len(rows)):
        raise BadRows(rows.skipped, len(source))
    return rows


class FileRows:
    """Implements `examples.Rows`. A row is read and rendered when it is asked for; of all rows only their lengths are
    held. Made by `read_rows`."""

    kind: Kind

    def __init__(self, source: Source, renderer: Renderer, media: Media, most_tokens: int, too_long: TooLong) -> None:
        self.kind = "sft"
        self.skipped: Sequence[Problem] = ()
        self.shortened = 0
        """Rows of which answers were left out because they do not fit."""
        self.digest = ""
        """SHA-256 of the good rows in order, to see whether a data set is the same."""
        self.pictures_digest = ""
        """SHA-256 of the files of their pictures in order; "" if they have none."""
        self._source = source
        self._renderer = renderer
        self._media = media
        self._most_tokens = most_tokens
        self._too_long = too_long
        self._good = np.zeros(0, np.int64)  # numbers of good rows in the source
        self._lengths = np.zeros((0, 2), np.int64)  # length and trained tokens of all examples
        self._ends = np.zeros(0, np.int64)  # of each row's examples in `_lengths`

    def check(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Read and render every row once; decides `kind`, `skipped` and which rows are good."""
        good: list[int] = []
        lengths: list[tuple[int, int]] = []
        ends: list[int] = []
        problems: list[Problem] = []
        digest, pictures, any_picture = hashlib.sha256(), hashlib.sha256(), False
        for row in itertools.chain.from_iterable(self._encoded()):
            try:
                found, short = self._finished(row, kind=self.kind if good else None)
            except RowError as error:
                problems.extend(error.problems)
            else:
                self.kind = "preference" if isinstance(found, Preference) else "sft"
                self.shortened += short
                good.append(row.at)
                lengths.extend((each.length, each.trained) for each in _examples(found))
                ends.append(len(lengths))
                digest.update(repr(row.row).encode(errors="surrogatepass"))
                for each in (each for talk in row.talks for each in talk.digests):
                    pictures.update(each)
                    any_picture = True
            if progress is not None:
                progress(row.at + 1, len(self._source))
        self._good, self._ends = np.array(good, np.int64), np.array(ends, np.int64)
        self._lengths = np.array(lengths, np.int64).reshape(-1, 2)
        self.skipped, self.digest = tuple(problems), digest.hexdigest()
        self.pictures_digest = pictures.hexdigest() if any_picture else ""
        self._media.complete()

    def __len__(self) -> int:
        return len(self._good)

    def examples(self, index: int) -> Sequence[Example] | Preference:
        """See `examples.Rows`. Raises RowError if a file has changed since it was checked."""
        at = int(self._good[index])
        return self._finished(self._begin(at), kind=self.kind)[0]

    def lengths(self, index: int) -> Sequence[tuple[int, int]]:
        """See `examples.Rows`."""
        begin = int(self._ends[index - 1]) if index else 0
        return [(int(length), int(trained)) for length, trained in self._lengths[begin : int(self._ends[index])]]

    def prompt(self, index: int) -> tuple[tinker.ModelInput, str]:
        """See `examples.Rows`."""
        at = int(self._good[index])
        form = parse_row(self._source.row(at), self._source.place(at))
        try:
            talk = self._renderer.begin(form.chosen if isinstance(form, Pair) else form, self._media)
        except CannotRender as error:
            raise self._refused(at, error) from error
        answers = self._answers(talk, at)
        kept = self._fitting(answers, at)
        return kept[-1].prompt, kept[-1].text

    def raw(self, index: int) -> Mapping[str, Any]:
        """See `examples.Rows`."""
        return self._source.row(int(self._good[index]))

    def place(self, index: int) -> str:
        """The file and the line or row of row `index`."""
        return self._source.place(int(self._good[index]))

    @property
    def tokens(self) -> int:
        """Of all examples, with the positions of pictures."""
        return int(self._lengths[:, 0].sum())

    @property
    def trained(self) -> int:
        """Tokens of all examples that are trained."""
        return int(self._lengths[:, 1].sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return int(self._lengths[:, 0].max(initial=0))

    @property
    def data(self) -> int:
        """How many examples there are; two for each pair."""
        return len(self._lengths)

    def _encoded(self) -> Iterator[list["_BegunRow"]]:
        """All rows, bad ones too, in groups whose tokens are made together: in another thread, while the next group is
        rendered, as tokenizers let other threads run."""
        before: tuple[list[_BegunRow], Future[None]] | None = None
        with ThreadPoolExecutor(1, "tokens of rows") as thread:
            for group in self._begun():
                talks = [talk for each in group for talk in each.talks]
                done = thread.submit(self._renderer.encode_ahead, talks)
                if before is not None:
                    before[1].result()
                    yield before[0]
                before = group, done
            if before is not None:
                before[1].result()
                yield before[0]

    def _begun(self) -> Iterator[list["_BegunRow"]]:
        """All rows as texts, in groups."""
        group: list[_BegunRow] = []
        pictures = 0
        for at in range(len(self._source)):
            group.append(self._begin(at))
            pictures += sum(talk.pictures for talk in group[-1].talks)
            if len(group) == ROWS_TOGETHER or pictures > PICTURES_TOGETHER:
                yield group
                group, pictures = [], 0
        yield group

    def _begin(self, at: int) -> "_BegunRow":
        """Row `at` of the source as text, or why it is refused."""
        row: Mapping[str, Any] = {}
        form: Answered | Pair | None = None
        try:
            row = self._source.row(at)
            form = parse_row(row, self._source.place(at))
            sides = (form.chosen, form.rejected) if isinstance(form, Pair) else (form,)
            return _BegunRow(at, row, form, [self._renderer.begin(side, self._media) for side in sides])
        except CannotRender as error:
            return _BegunRow(at, row, form, [], self._refused(at, error))
        except RowError as error:
            return _BegunRow(at, row, form, [], error)

    def _finished(self, begun: "_BegunRow", *, kind: Kind | None) -> tuple[Sequence[Example] | Preference, bool]:
        """The row, and whether it was shortened. Raises RowError, also for a row of another kind than `kind`."""
        place = self._source.place(begun.at)
        if begun.form is not None and kind not in (None, kind_of(begun.form)):
            other = "are pairs of chosen and rejected" if kind == "preference" else "have one answer"
            raise RowError(Problem(place, "", f"is of another kind than the rows before it, which {other}"))
        if begun.error is not None:
            raise begun.error
        if not isinstance(begun.form, Pair):
            (talk,) = begun.talks
            answers = self._answers(talk, begun.at)
            kept = self._fitting(answers, begun.at)
            return examples_of(kept, place), len(kept) < len(answers)
        chosen, rejected = (
            self._side(talk, begun.at, name) for talk, name in zip(begun.talks, ("chosen", "rejected"), strict=True)
        )
        return Preference(place, chosen, rejected), False

    def _answers(self, talk: Begun, at: int) -> list[Answer]:
        try:
            return talk.answers()
        except CannotRender as error:
            raise self._refused(at, error) from error

    def _refused(self, at: int, error: CannotRender) -> RowError:
        return RowError(Problem(self._source.place(at), error.field, error.reason))

    def _fitting(self, answers: Sequence[Answer], at: int) -> Sequence[Answer]:
        """The answers before the first that does not fit; RowError if none is left, or any is missing and must not."""
        fit = next((n for n, answer in enumerate(answers) if answer.length > self._most_tokens), len(answers))
        if fit == len(answers) or (fit and self._too_long == "shorten"):
            return answers[:fit]
        long = answers[fit]
        reason = f"with this answer the row has {long.length} tokens, at most {self._most_tokens} fit"
        raise RowError(Problem(self._source.place(at), long.field, reason))

    def _side(self, talk: Begun, at: int, name: str) -> Example:
        """One answer of a pair as one datum, never shortened."""
        place = self._source.place(at)
        answers = self._answers(talk, at)
        for answer in answers:
            if answer.length > self._most_tokens:
                reason = f"with this answer the row has {answer.length} tokens, at most {self._most_tokens} fit"
                raise RowError(Problem(place, answer.field, reason))
        found = examples_of(answers, place)
        if len(found) != 1:
            reason = f"the chat template rewrites earlier turns, so its {len(answers)} answers do not fit one datum"
            raise RowError(Problem(place, name, f"{reason}; make a pair of the last answer"))
        return found[0]


@dataclass(frozen=True, slots=True)
class _BegunRow:
    """Row `at` of the source. `form`: None if it is in none. `talks`: of a pair two, the chosen first; none if there is
    an `error`."""

    at: int
    row: Mapping[str, Any]
    form: Answered | Pair | None
    talks: Sequence[Begun]
    error: RowError | None = None


def _examples(found: Sequence[Example] | Preference) -> Sequence[Example]:
    return (found.chosen, found.rejected) if isinstance(found, Preference) else found
