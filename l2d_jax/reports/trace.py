"""Traces as files: `trace.jsonl`, a row per token, and `trace.html`, a page of coloured answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.trace import TokenTrace
from l2d_jax.reports import page


class AnswerTrace(NamedTuple):
    """The trace of an answer, with its question."""

    prompt: int  # number of the prompt, from 0
    question: str  # the prompt as text
    settings: DecodeConfig
    tokens: list[TokenTrace]

    @property
    def changed(self) -> list[bool]:
        """For each token, whether the language model alone would have chosen another one."""
        return [token.likeliest != token.plain_likeliest for token in self.tokens]


def write_trace(folder: Path, answers: Sequence[AnswerTrace]) -> None:
    """Write both files into a folder; use `partial.output_folder` to get both files or neither."""
    rows = ""
    for sequence, answer in enumerate(answers):
        given = {"prompt": answer.prompt, "solver": answer.settings.solver, "budget": answer.settings.budget}
        for position, token in enumerate(answer.tokens):
            rows += json.dumps({"sequence": sequence, **given, "position": position, **token._asdict()}) + "\n"
    (folder / "trace.jsonl").write_text(rows, encoding="utf-8")
    page.write_page(folder / "trace.html", f"Trace of {len(answers)} answers", template="trace.html", answers=answers)
