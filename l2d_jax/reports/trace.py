"""Traces as files: `trace.jsonl`, a row per token, and `trace.html`, a page of coloured answers."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.trace import TokenTrace
from l2d_jax.reports import page

STYLE = """\
h2 { font-size: 1rem; margin: 2rem 0 0; white-space: pre-wrap; }
p { margin: .3rem 0; } .numbers { opacity: .75; font-size: .9rem; }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; }
/* One hue over either background, never opaque: the text keeps its contrast. */
.answer span, .legend i { background: rgb(235 110 0 / calc(.05 + .5 * var(--t))); border-radius: .15rem; }
.answer span { margin-right: .08rem; }
.answer span:hover { outline: .1rem solid; }
.answer .changed { text-decoration: underline; text-underline-offset: .2rem; }
.answer .skipped { background: none; border-bottom: .12rem dashed; }
.answer .silent { opacity: .6; font-size: .8em; }
.legend i { padding: 0 .5rem; font-style: normal; }"""
LEGEND = " ".join(f'<i style="--t:{tenth / 10}">{tenth / 10}</i>' for tenth in range(0, 11, 2))
INTRODUCTION = f"""\
<p class="legend">t from which on the arg max of a token was the final one: {LEGEND}
<span class="answer"><span class="changed">other than the language model's own</span>
<span class="skipped">skipped by the gate</span></span></p>
<p class="numbers">A token that adds no text, such as a part of a character, is shown as ⟨id⟩. Point at a token for its
numbers: entropies are in nats, evaluations are of the path.</p>"""


class AnswerTrace(NamedTuple):
    """The trace of one answer, and the question."""

    prompt: int  # number of the prompt, from 0
    question: str  # the prompt as text
    settings: DecodeConfig
    tokens: list[TokenTrace]


def write_trace(folder: Path, answers: Sequence[AnswerTrace]) -> None:
    """Write both files into a folder; take one from `files.output_folder` to get both files or neither."""
    rows = ""
    for sequence, answer in enumerate(answers):
        given = {"prompt": answer.prompt, "solver": answer.settings.solver, "budget": answer.settings.budget}
        for position, token in enumerate(answer.tokens):
            rows += json.dumps({"sequence": sequence, **given, "position": position, **token._asdict()}) + "\n"
    (folder / "trace.jsonl").write_text(rows, encoding="utf-8")
    title, sections = f"Trace of {len(answers)} answers", [INTRODUCTION, *map(_section, answers)]
    page.write_page(folder / "trace.html", title, sections, style=STYLE)


def _section(answer: AnswerTrace) -> str:
    tokens, settings = answer.tokens, answer.settings
    number, changed = max(1, len(tokens)), sum(map(_is_changed, tokens))
    evaluations = f"{sum(token.evaluations for token in tokens) / number:.1f} evaluations"
    settled = f"settled at t = {sum(token.settled for token in tokens) / number:.2f}"
    numbers = f"{settings.solver}, budget {settings.budget}: {len(tokens)} tokens, on average {evaluations}, {settled}"
    numbers += f"; {changed} differ from the language model's own"
    spans = "".join(_span(token, position) for position, token in enumerate(tokens))
    head = f'<h2>{html.escape(answer.question)}</h2>\n<p class="numbers">{html.escape(numbers)}</p>'
    return f'{head}\n<div class="answer">{spans}</div>'


def _span(token: TokenTrace, position: int) -> str:
    numbers = [f"{name.replace('_', ' ')}: {_show(value)}" for name, value in token._asdict().items()]
    tip = html.escape("\n".join([f"position: {position}", *numbers])).replace("\n", "&#10;")
    states = {"skipped": token.skipped, "silent": not token.text, "changed": _is_changed(token)}
    kinds = [kind for kind, holds in states.items() if holds]
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    text = html.escape(token.text.replace("\n", "↵\n") or f"⟨{token.token}⟩")
    return f'<span{kind} style="--t:{token.settled:.3f}" title="{tip}">{text}</span>'


def _is_changed(token: TokenTrace) -> bool:
    return token.likeliest != token.plain_likeliest


def _show(value: str | float | int) -> str:
    return repr(value) if isinstance(value, str) else f"{value:.4g}" if type(value) is float else str(value).lower()
