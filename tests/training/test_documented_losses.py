"""docs/losses.md agrees with the descriptions in the losses and optimizers."""

from pathlib import Path

from tinker_local.backend.training.losses import LOSSES, NEAREST
from tinker_local.backend.training.losses.loss import Loss
from tinker_local.backend.training.optimizers import OPTIMIZERS
from tinker_local.backend.training.optimizers.optimizer import Optimizer

DOCUMENT = Path(__file__).parents[2] / "docs" / "losses.md"


def table(heading: str) -> list[str]:
    """The rows of the first table after a heading, without the header."""
    lines = DOCUMENT.read_text().split(f"\n## {heading}\n")[1].splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("| ---")) + 1
    return lines[first : lines.index("", first)]


def loss_row(loss: Loss) -> str:
    formula = loss.formula + ("; targets may be `[N, K]`, dense or CSR" if loss.candidates else "")
    absent = {name: f" (absent: {value:g})" for name, value in loss.optional.items()}
    if loss.by_spans is not None:
        absent[loss.by_spans] = " (absent: what provenance spans call sampled)"
    inputs = ", ".join(f"`{name}`{absent.get(name, '')}" for name in loss.inputs)
    masks = " and ".join(f"`{name}`" for name in loss.mask_inputs)
    settings = ", ".join(f"`{name}` {value}" for name, value in loss.settings.items()) or "none"
    return f"| `{loss.name}` | {formula} | {inputs} | {masks} | {settings} | {loss.source} |"


def optimizer_row(optimizer: Optimizer) -> str:
    settings = ", ".join(f"`{name}` {field.default}" for name, field in optimizer.settings.model_fields.items())
    state = ", ".join(f"`{name}`" for name in optimizer.state_names)
    return f"| `{optimizer.name}` | {settings} | {state} | {optimizer.source} |"


def test_the_table_of_losses_is_what_the_losses_say() -> None:
    rows = table("Losses")
    assert rows[: len(LOSSES)] == [loss_row(loss) for loss in LOSSES.values()]
    assert [row.split("`")[1] for row in rows[len(LOSSES) :]] == list(NEAREST)


def test_the_table_of_optimizers_is_what_the_optimizers_say() -> None:
    rows = table("Optimizers")
    assert rows[: len(OPTIMIZERS)] == [optimizer_row(optimizer) for optimizer in OPTIMIZERS.values()]
