"""Figures as PNG and SVG files, in one style; no display is needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

GREY = "#7a7a7a"  # colour of text and lines: legible on white and on black, so that one SVG serves both
GREYS = ("text.color", "axes.titlecolor", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
LOOK: dict[Any, Any] = dict.fromkeys(GREYS, GREY) | {"axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False}
WIDTH, MANY = 5.0, 4  # inches of a panel; lines of a legend that fits into it
LOOK |= {"svg.fonttype": "none", "svg.hashsalt": "l2d_jax"}  # with a salt the same figure gives the same file
mpl.rcParams.update(LOOK)


@contextmanager
def saved_figure(panels: int, file: Path) -> Iterator[list[Any]]:
    """Panels next to each other, with legends, saved as `file` (a PNG on white) and as an SVG without background.

    A legend of many lines lies below its panel, or below the figure if all panels have the same lines.
    """
    figure, [axes] = plt.subplots(1, panels, figsize=(WIDTH * panels, 4), layout="constrained", squeeze=False)
    yield list(axes)
    drawn = [panel.get_legend_handles_labels() for panel in axes]
    if len(drawn[0][1]) > MANY and all(labels == drawn[0][1] for _, labels in drawn):
        figure.legend(*drawn[0], loc="outside lower center", ncols=_columns(drawn[0][1], WIDTH * panels))
    else:
        for panel, (_, labels) in zip(axes, drawn, strict=True):
            if len(labels) > MANY:
                panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=_columns(labels, WIDTH))
            elif labels:
                panel.legend()
    figure.savefig(file.with_suffix(".png"), dpi=150)
    figure.savefig(file.with_suffix(".svg"), transparent=True, metadata={"Date": None})
    plt.close(figure)


def _columns(labels: Sequence[str], width: float) -> int:
    """The number of columns of a legend that fit into `width` inches, at most 4."""
    return max(1, min(4, int(width / (0.6 + max(map(len, labels)) / 13))))


def draw_rates(
    axes: Any, places: Sequence[float | int], rates: Sequence[tuple[float, float, float]], *, label: str, **style: str
) -> None:
    """Draw a line through means with intervals, in matplotlib's `style`; a rate is (mean, lower bound, upper bound)."""
    errors = [[mean - low for mean, low, _ in rates], [high - mean for mean, _, high in rates]]
    axes.errorbar(places, [mean for mean, _, _ in rates], yerr=errors, marker="o", capsize=3, label=label, **style)
