"""The folder of one evaluation: `samples.jsonl` has a line for each scored problem, `results.json` has the figures.

An evaluation that was interrupted continues where it stopped; with other settings it is refused.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from l2d_jax.errors import InputError
from l2d_jax.evaluation import statistics
from l2d_jax.evaluation.tasks.problem import Problem, Score
from l2d_jax.files import complete_lines, read_json, write_whole

KINDS = ("strict", "relaxed")
SAMPLES, RESULTS = "samples.jsonl", "results.json"


def accuracy_interval(figures: Mapping[str, Any], kind: str) -> tuple[float, float, float]:
    """Mean accuracy and the bounds of its 95 % interval, from an evaluation's figures and a kind of score."""
    rate = figures[kind]["accuracy"]
    return rate["mean"], rate["low"], rate["high"]


class Results:
    """The problems scored so far, in a folder that belongs to one run."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Open or create the folder; raises `InputError` if it holds another run, or cannot be written."""
        self.folder = folder
        self.run: dict[str, Any] = json.loads(json.dumps(run))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RESULTS).exists():
                self._refuse_other(read_json(folder / RESULTS).get("run", {}))
            else:
                write_whole(folder / RESULTS, json.dumps({"run": self.run}, indent=2) + "\n")
            self.samples = self._read()
        except OSError as error:
            raise InputError(f"cannot write to {folder} ({error.strerror}): choose another --out") from error

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append scored problems."""
        with (self.folder / SAMPLES).open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        self.samples |= {line["id"]: dict(line) for line in lines}

    def finish(self, speed: Mapping[str, Any]) -> dict[str, Any]:
        """Write and return the figures; `speed` covers the problems that this process answered."""
        figures = {"run": self.run, **summarise(self.samples), "speed": dict(speed)}
        write_whole(self.folder / RESULTS, json.dumps(figures, indent=2) + "\n")
        return figures

    def _refuse_other(self, run: Mapping[str, Any]) -> None:
        names = sorted(name for name in {*run, *self.run} if run.get(name) != self.run.get(name))
        if names:
            changes = "; ".join(f"{name} was {run.get(name)!r}, is {self.run.get(name)!r}" for name in names[:3])
            raise InputError(
                f"{self.folder} holds another evaluation ({changes}): give it another --name, or remove it"
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        """Read the complete lines, and remove the rest of a line that was cut off."""
        file = self.folder / SAMPLES
        lines = complete_lines(file)
        if file.exists():
            write_whole(file, "".join(lines))
        return {line["id"]: line for line in map(json.loads, lines)}


def sample_line(problem: Problem, prompt: str, completions: Sequence[str], scores: Sequence[Score]) -> dict[str, Any]:
    """A line of `samples.jsonl`."""
    judged = [
        {"text": text.encode(errors="replace").decode(), **score._asdict()}
        for text, score in zip(completions, scores, strict=True)
    ]
    return {"id": problem.id, "subject": problem.subject, "answer": problem.answer, "prompt": prompt, "samples": judged}


def summarise(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy, pass@k and accuracy by subject for each kind of score, with 95 % intervals over problems."""
    subjects = {name: line["subject"] for name, line in samples.items()}
    figures: dict[str, Any] = {"problems": len(samples)}
    for kind in KINDS:
        scores = {name: [float(sample[kind]) for sample in line["samples"]] for name, line in samples.items()}
        figures[kind] = {
            "accuracy": statistics.accuracy(scores).to_dict(),
            "pass": {str(k): rate.to_dict() for k, rate in statistics.pass_rates(scores).items()},
            "subjects": {name: rate.to_dict() for name, rate in statistics.by_subject(scores, subjects).items()},
        }
    return figures
