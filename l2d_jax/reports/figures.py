"""Figures as files, PNG and SVG, in one style; drawn without a display."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

GREY = "#7a7a7a"  # of text and lines: it reads on white and on black, so that one SVG serves both
mpl.rcParams.update(
    {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
        "axes.titlecolor": GREY,
        "axes.grid": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "l2d_jax",  # the same figure is the same file
    }
)


def new_figure(panels: int) -> tuple[Any, list[Any]]:
    """A figure with panels side by side, and these."""
    figure, axes = plt.subplots(1, panels, figsize=(5 * panels, 4), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def draw_rates(
    axes: Any, places: Sequence[float | int], rates: Sequence[tuple[float, float, float]], *, label: str
) -> None:
    """A line through means, each with the bounds of its interval."""
    means = [mean for mean, _, _ in rates]
    errors = [[mean - low for mean, low, _ in rates], [high - mean for mean, _, high in rates]]
    axes.errorbar(places, means, yerr=errors, marker="o", capsize=3, label=label)


def save_figure(figure: Any, file: Path) -> None:
    """Write a figure as `file`, a PNG on white, and beside it as an SVG without a background; it is closed."""
    figure.savefig(file.with_suffix(".png"), dpi=150)
    figure.savefig(file.with_suffix(".svg"), transparent=True, metadata={"Date": None})
    plt.close(figure)
