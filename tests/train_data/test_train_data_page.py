"""Rows of the page are rows that are read, and what it says of options is so."""

import json
import re
from pathlib import Path

import pytest
from tinker_local.client.train.forms import Dialogue, Pair, Written, parse_row

PAGE = (Path(__file__).parents[2] / "docs" / "train-data.md").read_text()
BLOCKS = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
FORMS = [Dialogue, Dialogue, Dialogue, Dialogue, Written, Pair]


def test_the_page_shows_each_form() -> None:
    assert len(BLOCKS) == len(FORMS)


@pytest.mark.parametrize(("block", "form"), zip(BLOCKS, FORMS, strict=False))
def test_a_row_of_the_page_is_read(block: str, form: type) -> None:
    assert isinstance(parse_row(json.loads(block), "the page"), form)
