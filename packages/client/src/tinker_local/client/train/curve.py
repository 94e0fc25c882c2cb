"""A curve as text, for a terminal."""

import math
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"


def draw_curve(points: Sequence[tuple[float, float]], width: int = 64, height: int = 8) -> list[str]:
    """Lines of text for points (x, y), which ascend by x; points that are not finite are left out.

    Each column has the mean of its points, or none where there are no points. The first and last line have the largest
    and smallest mean at their left. Empty without points.
    """
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return []
    first, last = finite[0][0], finite[-1][0]
    width = max(1, min(width, len(finite)))
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in finite:
        place = 0.0 if last == first else (x - first) / (last - first)
        columns[min(width - 1, int(place * width))].append(y)
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    steps = len(BLOCKS) - 1
    heights = [None if mean is None else 1 + round((mean - low) / span * (height * steps - 1)) for mean in means]
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(" " if tall is None else BLOCKS[min(steps, max(0, tall - row * steps))] for tall in heights)
        label = f"{high:.4g}" if row == height - 1 else f"{low:.4g}" if row == 0 else ""
        lines.append(f"{label:>9} |{cells}".rstrip())
    lines.append(f"{'':>9}  {first:g}{last:>{max(1, width - len(f'{first:g}'))}g}")
    return lines
