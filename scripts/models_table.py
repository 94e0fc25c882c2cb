"""Writes README's table of models, GPUs and contexts from the memory plan: .venv/bin/python scripts/models_table.py"""

from pathlib import Path

from tinker_local.backend.models.fitting import COLUMNS, SHAPES, row

PAGE = Path(__file__).parent.parent / "README.md"
HEAD = f"| model | {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * len(COLUMNS)}\n"


def rows(page: str) -> list[str]:
    """The lines of the table in `page`."""
    return page.partition(HEAD)[2].partition("\n\n")[0].splitlines()


def main() -> None:
    page = PAGE.read_text()
    before, after = page.partition(HEAD)[0], page.partition(HEAD)[2].partition("\n\n")[2]
    PAGE.write_text(f"{before}{HEAD}{chr(10).join(map(row, SHAPES))}\n\n{after}")


if __name__ == "__main__":
    main()
