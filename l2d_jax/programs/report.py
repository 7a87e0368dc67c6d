"""Shows the measurements of runs, as tables and as a page."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from l2d_jax.errors import require
from l2d_jax.reports import evaluation as evaluations
from l2d_jax.reports import evaluation_figures as figures
from l2d_jax.reports import training
from l2d_jax.reports.page import Section, write_page
from l2d_jax.reports.suite import suite_rows, suite_section
from l2d_jax.storage import mirror

INTERVALS = "Intervals are 95 %, over problems."
ENDS = (
    "Free answers whose diffusion stops at t, with the whole budget spent before. t = 0 is the language model itself."
)
GUIDANCE = "Accuracy against the strength of the class label. A category is the mean of its tasks."
WITHIN = "Tokens of right answers, with the true tokens before them, read off at every t of one run."


def run(options: Namespace) -> None:
    """Report every workdir. The section on the suite, with the rows of all workdirs, is printed once."""
    others = evaluations.read_beside(options.beside)
    labels = dict(zip(options.workdir, short_names(options.workdir), strict=True))
    rows = [row for workdir, label in labels.items() for row in suite_rows(_results_of(workdir), label)]
    suite = suite_section(rows, others)
    for workdir in labels:
        report_workdir(workdir, others, suite=suite)
    if suite is not None:
        suite.printed()


def report_workdir(workdir: Path, beside: Mapping[str, Mapping[str, float]], *, suite: Section | None = None) -> None:
    """Print tables and write the page, with a section `suite` that is not printed.

    Raises `InputError` for a workdir without results.
    """
    sections = [*_training_sections(workdir), *_evaluation_sections(workdir, beside, suite)]
    require(sections != [], f"workdir {workdir} has no validation and no evaluation: train or evaluate first")
    write_page(workdir / "report.html", f"Report of {workdir.name}", sections=sections)
    print(f"written to {mirror.shown_places(str(workdir / 'report.html'))}")


def _training_sections(workdir: Path) -> list[Section]:
    """The section on training; its tables are also printed. Empty if nothing was validated."""
    if not (workdir / "metrics.jsonl").exists():
        return []
    before, after = training.first_and_last(workdir)
    print(f"{mirror.shown_places(str(workdir))}, after {after['step']} steps")
    losses, accuracy = training.loss_rows(before, after), training.budget_rows(after)
    training.draw_training(before, after, workdir / "report.png")
    text = f"After {after['step']} steps; accuracy is teacher-forced, on held-out answers. {INTERVALS}"
    return [Section("Training", text, [workdir / "report.png"], [losses, accuracy]).printed()]


def short_names(workdirs: Sequence[Path]) -> list[str]:
    """Labels for workdirs: their last names if these differ, else their whole paths."""
    names = [workdir.resolve().name for workdir in workdirs]
    return names if len(set(names)) == len(set(workdirs)) else [str(workdir) for workdir in workdirs]


def _results_of(workdir: Path) -> Path:
    """The folder of a workdir that has a folder for each task; an --out folder is one."""
    return workdir / "eval" if (workdir / "eval").is_dir() else workdir


def _evaluation_sections(
    workdir: Path, beside: Mapping[str, Mapping[str, float]], suite: Section | None
) -> list[Section]:
    """The sections on evaluations; their table is also printed. Empty if nothing was evaluated."""
    folder = _results_of(workdir)
    evaluated, within = evaluations.collect(folder), evaluations.collect_within(folder)
    if not evaluated:
        return []
    text = f"Strict scores follow the rules of the authors' release, relaxed ones what readers accept. {INTERVALS}"
    sections = [Section("Tasks", text, [], [evaluations.task_rows(evaluated, beside)]).printed()]
    sections += [] if suite is None else [suite]
    if figures.draw_budgets(evaluated, file := folder / "budgets.png"):
        text = "A budget of 1 is the language model itself."
        sections.append(Section("Accuracy against the budget", text, [file]))
    if figures.draw_ends(evaluated, file := folder / "ends.png"):
        sections.append(Section("Accuracy against the end of the diffusion", ENDS, [file]))
    if figures.draw_within(within, file := folder / "within.png"):
        sections.append(Section("Within one diffusion", WITHIN, [file]))
    if figures.draw_guidance(evaluated, file := folder / "guidance.png"):
        sections.append(Section("Guidance", GUIDANCE, [file]))
    return sections
