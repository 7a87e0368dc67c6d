"""The folder of one evaluation: `samples.jsonl`, a line per problem as it is scored, and `results.json`, the figures.

An evaluation that was cut off goes on where it stopped; with other settings it is refused.
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
    """The mean with the bounds of its interval, of the figures of an evaluation."""
    found = figures[kind]["accuracy"]
    return found["mean"], found["low"], found["high"]


class Results:
    """What has been scored so far, in a folder that belongs to one run."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Raises `InputError` where the folder holds another run, or cannot be written."""
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
        """Write and return the figures; `speed` is that of this process, over what it did itself."""
        found = {"run": self.run, **summarise(self.samples), "speed": dict(speed)}
        write_whole(self.folder / RESULTS, json.dumps(found, indent=2) + "\n")
        return found

    def _refuse_other(self, found: Mapping[str, Any]) -> None:
        names = sorted(name for name in {*found, *self.run} if found.get(name) != self.run.get(name))
        if names:
            changes = "; ".join(f"{name} was {found.get(name)!r}, is {self.run.get(name)!r}" for name in names[:3])
            raise InputError(
                f"{self.folder} holds another evaluation ({changes}): give it another --name, or remove it"
            )

    def _read(self) -> dict[str, dict[str, Any]]:
        """The complete lines; the rest of one that was cut off is removed."""
        file = self.folder / SAMPLES
        lines = complete_lines(file)
        if file.exists():
            write_whole(file, "".join(lines))
        found = map(json.loads, lines)
        return {line["id"]: line for line in found}


def sample_line(problem: Problem, prompt: str, completions: Sequence[str], scores: Sequence[Score]) -> dict[str, Any]:
    """A line of `samples.jsonl`."""
    given = [
        {"text": text.encode(errors="replace").decode(), **score._asdict()}
        for text, score in zip(completions, scores, strict=True)
    ]
    return {"id": problem.id, "subject": problem.subject, "answer": problem.answer, "prompt": prompt, "samples": given}


def summarise(samples: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy, pass@k and a table by subject of each kind of score, with 95 % intervals over problems."""
    subjects = {name: line["subject"] for name, line in samples.items()}
    figures: dict[str, Any] = {"problems": len(samples)}
    for kind in KINDS:
        scores = {name: [float(given[kind]) for given in line["samples"]] for name, line in samples.items()}
        figures[kind] = {
            "accuracy": statistics.accuracy(scores).to_dict(),
            "pass": {str(k): found.to_dict() for k, found in statistics.pass_rates(scores).items()},
            "subjects": {name: found.to_dict() for name, found in statistics.by_subject(scores, subjects).items()},
        }
    return figures
