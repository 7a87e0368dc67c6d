"""The folder of one evaluation: `samples.jsonl` has a line for each scored problem, `results.json` has the figures.

An interrupted evaluation continues where it stopped; with other settings it is refused. Damaged lines, and lines that
share an id, are skipped with a warning, and their problems are answered again.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NotRequired

from annotated_types import Len
from typing_extensions import TypedDict

from l2d_jax import statistics
from l2d_jax.config.ranges import CountOrZero
from l2d_jax.errors import InputError, require, shown
from l2d_jax.evaluation.tasks.problem import Problem, Score
from l2d_jax.files import Count, Share, changes, check, differences, explained, read_json, read_lines, write_whole
from l2d_jax.storage import mirror

KINDS = ("strict", "relaxed")
SAMPLES, RESULTS = "samples.jsonl", "results.json"


class _Judged(TypedDict):
    text: str
    strict: Share
    relaxed: Share
    extracted: str | None
    relaxed_extracted: str | None
    reason: str
    tokens: NotRequired[CountOrZero]  # earlier versions did not count them
    evaluations: NotRequired[CountOrZero]
    passes: NotRequired[CountOrZero]


class _Sample(TypedDict):
    """A line of `samples.jsonl`."""

    id: str
    subject: str | None
    answer: str
    prompt: str
    samples: Annotated[list[_Judged], Len(1)]


_Kind = TypedDict("_Kind", {"accuracy": statistics.Rate, "pass": dict[str, statistics.Rate]})


class _Decode(TypedDict):
    solver: str
    budget: Count
    guidance: float
    end: NotRequired[float]  # 1 where it is missing


class _Asking(TypedDict):
    label: int | str | None


class _Run(TypedDict):
    task: str
    decode: _Decode
    asking: _Asking


_Costs = TypedDict(  # earlier versions did not count; None: no token was generated
    "_Costs",
    {"evaluations per token": NotRequired[float | None], "passes per token": NotRequired[float | None]},
)


class _Tuning(TypedDict):
    chosen: dict[str, dict[str, float]]  # by category
    runs: list[dict[str, float | str]]


class _Figures(_Costs):
    """The part of `results.json` that reports read."""

    run: _Run
    problems: Count
    strict: _Kind
    relaxed: _Kind


def accuracy_interval(figures: Mapping[str, Any], kind: str) -> tuple[float, float, float]:
    """Mean accuracy and the bounds of its 95 % interval, for one kind of score ("strict" or "relaxed")."""
    rate = figures[kind]["accuracy"]
    return float(rate["mean"]), float(rate["low"]), float(rate["high"])


def read_figures(file: Path) -> dict[str, Any] | None:
    """The figures of a finished evaluation, or None; raises `InputError` for a damaged file."""
    figures = read_json(file)
    if figures.keys().isdisjoint(("problems", *KINDS)):
        return None
    check(figures, _Figures, file, remedy=f"remove it, and evaluate again: the answers in {SAMPLES} are kept")
    return figures


class Said(NamedTuple):
    """A completion and its cost."""

    text: str
    tokens: int = 0  # generated tokens, including the stop token
    evaluations: int = 0  # evaluations of the path for these tokens
    passes: int = 0  # passes over the weights, including those of the language model


class Results:
    """The problems scored so far, in the folder of one evaluation."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Open or create the folder; raises `InputError` if it has another evaluation, or cannot be written."""
        self.folder = folder
        self.run: dict[str, Any] = json.loads(json.dumps(run))
        self.tuning: dict[str, Any] | None = None  # options chosen on held-out problems, and the scores there
        with explained(f"cannot write to {folder}", "choose another --out"):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RESULTS).exists():
                self._refuse_other()
                self.tuning = self._read_tuning()
            else:
                write_whole(folder / RESULTS, json.dumps({"run": self.run}, indent=2) + "\n")
            kept = read_lines(folder / SAMPLES, (_Sample,), _repeated)
            if (folder / SAMPLES).exists():
                write_whole(folder / SAMPLES, b"".join(text for text, _ in kept))
            self.samples: dict[str, dict[str, Any]] = {line["id"]: line for _, line in kept}

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append scored problems."""
        with (self.folder / SAMPLES).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        mirror.publish(self.folder)
        self.samples |= {line["id"]: dict(line) for line in lines}

    def record_tuning(self, tuning: Mapping[str, Any]) -> None:
        """Write the options that were chosen on held-out problems, so that a continued evaluation keeps them."""
        self.tuning = dict(tuning)
        write_whole(self.folder / RESULTS, json.dumps({"run": self.run, "tuning": self.tuning}, indent=2) + "\n")
        mirror.publish(self.folder)

    def finish(self, speed: Mapping[str, Any], *, counts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write and return the figures.

        `speed` covers the problems that this process answered; `counts` are the task's problems and the paper's.
        """
        known = {"counts": counts, "tuning": self.tuning}
        known = {name: dict(values) for name, values in known.items() if values is not None}
        figures = {"run": self.run, **known, **summarise(self.samples), "speed": dict(speed)}
        write_whole(self.folder / RESULTS, json.dumps(figures, indent=2) + "\n")
        mirror.publish(self.folder)
        return figures

    def _read_tuning(self) -> dict[str, Any] | None:
        """The recorded choice, or None; raises `InputError` if it is damaged."""
        file = self.folder / RESULTS
        if (tuning := read_json(file).get("tuning")) is None:
            return None
        check(tuning, _Tuning, f"tuning of {file}", remedy=f"give another --name, or remove {self.folder}")
        return dict(tuning)

    def _refuse_other(self) -> None:
        """Raise `InputError` if `results.json` has other settings, or is damaged: only this file records them."""
        file = self.folder / RESULTS
        try:
            run: dict[str, Any] = check(read_json(file).get("run"), dict[str, Any], "run")
            theirs: dict[str, str] = check(run.pop("fingerprint", None) or {}, dict[str, str], "fingerprint")
        except InputError:
            problem = f"{file} does not say what was evaluated"
            raise InputError(f"{problem}: give another --name, or remove {self.folder}") from None
        asked = dict(self.run)
        ours = asked.pop("fingerprint", None) or {}
        changed = differences(run, asked)[:3]
        if not changed and theirs != ours:
            changed = changes(theirs, ours) or ["of a former version"]
        problem = f"{self.folder} holds another evaluation ({'; '.join(changed)})"
        require(not changed, f"{problem}: give it another --name, or remove it")


def _repeated(lines: list[dict[str, Any]]) -> dict[int, str]:
    """Lines that share an id, keyed by place, with the reason: at most one of them can be right."""
    count = Counter(line["id"] for line in lines)
    return {i: f"id {shown(line['id'])} is repeated" for i, line in enumerate(lines) if count[line["id"]] > 1}


def sample_line(problem: Problem, prompt: str, completions: Sequence[Said], scores: Sequence[Score]) -> dict[str, Any]:
    """A line of `samples.jsonl`."""
    judged = [
        {"text": said.text.encode(errors="replace").decode(), **score._asdict()}
        | {"tokens": said.tokens, "evaluations": said.evaluations, "passes": said.passes}
        for said, score in zip(completions, scores, strict=True)
    ]
    return {"id": problem.id, "subject": problem.subject, "answer": problem.answer, "prompt": prompt, "samples": judged}


def summarise(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy, pass@k and accuracy by subject for each kind of score, with 95 % intervals over problems.

    Also the mean number of evaluations of the path, and of passes over the weights, per generated token; None if no
    token was counted.
    """
    subjects = {name: line["subject"] for name, line in samples.items()}
    figures: dict[str, Any] = {"problems": len(samples)}
    for name in ("evaluations", "passes"):
        counted = [sample for line in samples.values() for sample in line["samples"] if name in sample]
        tokens, taken = (sum(sample[column] for sample in counted) for column in ("tokens", name))
        figures[f"{name} per token"] = taken / tokens if tokens else None
    for kind in KINDS:
        scores = {name: [float(sample[kind]) for sample in line["samples"]] for name, line in samples.items()}
        figures[kind] = {
            "accuracy": statistics.accuracy(scores)._asdict(),
            "pass": {str(k): rate._asdict() for k, rate in statistics.pass_rates(scores).items()},
            "subjects": {name: rate._asdict() for name, rate in statistics.by_subject(scores, subjects).items()},
        }
    return figures
