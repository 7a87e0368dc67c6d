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
LOOK |= {"svg.fonttype": "none", "svg.hashsalt": "l2d_jax"}  # with a salt the same figure gives the same file
mpl.rcParams.update(LOOK)


@contextmanager
def saved_figure(panels: int, file: Path) -> Iterator[list[Any]]:
    """Panels next to each other, with legends, saved as `file` (a PNG on white) and as an SVG without background."""
    figure, [axes] = plt.subplots(1, panels, figsize=(5 * panels, 4), layout="constrained", squeeze=False)
    yield list(axes)
    drawn = [panel.get_legend_handles_labels() for panel in axes]
    if len(drawn[0][1]) > 4 and all(labels == drawn[0][1] for _, labels in drawn):  # one for all, below them
        figure.legend(*drawn[0], loc="outside lower center", ncols=4)
    else:
        for panel, (_, labels) in zip(axes, drawn, strict=True):
            if labels:
                panel.legend()
    figure.savefig(file.with_suffix(".png"), dpi=150)
    figure.savefig(file.with_suffix(".svg"), transparent=True, metadata={"Date": None})
    plt.close(figure)


def draw_rates(
    axes: Any, places: Sequence[float | int], rates: Sequence[tuple[float, float, float]], *, label: str, **style: str
) -> None:
    """Draw a line through means with intervals, in matplotlib's `style`; a rate is (mean, lower bound, upper bound)."""
    errors = [[mean - low for mean, low, _ in rates], [high - mean for mean, _, high in rates]]
    axes.errorbar(places, [mean for mean, _, _ in rates], yerr=errors, marker="o", capsize=3, label=label, **style)
