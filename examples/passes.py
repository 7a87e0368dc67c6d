"""Draws the evaluations of one token as a grid of passes, for docs/parallel.md.

    python examples/passes.py --workdir runs/quickstart --budget 15 --problem 3 --out passes.png

Of an answer to a held-out word problem it takes the token that needs the most passes, and shows for each pass what was
guessed, what came true, and where it was wrong.
"""

import argparse
import dataclasses
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import l2d_jax
from l2d_jax.data import word_problems
from l2d_jax.decoding import trajectory
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.side_by_side import begin_progress, make_pass

COLORS = {"settled before": "#dddddd", "came true": "#7fbf7b", "wrong, and right now": "#ef8a62", "a guess": "#fbfbfb"}


def main() -> None:
    """Answer, find the token, follow its passes, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", default="runs/quickstart")
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--problem", type=int, default=3, help="number of the held-out problem")
    parser.add_argument("--out", type=Path, default=Path("passes.png"))
    options = parser.parse_args()
    loaded = l2d_jax.load(options.workdir)
    question = word_problems.problem(options.problem, split="test").question
    template = {"add_generation_prompt": True, "return_dict": False}
    prompt = loaded.tokenizer.apply_chat_template([{"role": "user", "content": question}], **template)
    answer = loaded.generate(prompt, budget=options.budget)

    settings = dataclasses.replace(loaded.defaults, budget=options.budget)
    refinement = Refinement.prepare(loaded.decoder, settings).side_by_side([options.budget], window=options.budget)
    model = loaded.decoder.reading(refines=True)
    known = trajectory.read_answer(model, prompt, answer, key=jax.random.key(0))
    grids = []
    for number in range(len(answer)):
        context, noise, keys = trajectory.place_token(model, known, number)
        step = jax.jit(lambda progress, *read: make_pass(model, *read, settings=refinement)(progress))
        progress, count = (
            begin_progress(model, context, settings=refinement, keys=keys),
            refinement.stages.count[:, None],
        )
        rows = [(int(progress.settled[0, 0]), np.asarray(progress.tokens[0, 0, 0]))]
        while rows[-1][0] < count[0, 0]:
            progress = step(progress, context, noise, count, keys)
            rows.append((int(progress.settled[0, 0]), np.asarray(progress.tokens[0, 0, 0])))
        grids.append(rows)
    number = max(range(len(grids)), key=lambda i: len(grids[i]))
    draw(grids[number], loaded.tokenizer, int(refinement.stages.count[0]), np.asarray(refinement.stages.times[0]))
    text = loaded.tokenizer.decode(answer[:number])
    place = f"the token behind {text[-30:]!r}" if number else "the first token of an answer"
    plt.title(f"{place}: {len(grids[number]) - 1} passes instead of {options.budget}", fontsize=9)
    plt.savefig(options.out, dpi=150, bbox_inches="tight")
    mean = jnp.mean(jnp.array([len(rows) - 1 for rows in grids]))
    print(f"{len(answer)} tokens, {mean:.2f} passes each in the mean")


def draw(rows: list, tokenizer: object, count: int, times: np.ndarray) -> None:
    """A row for each pass, a column for each evaluation."""
    _, axes = plt.subplots(figsize=(9, 0.6 + 0.5 * len(rows)))
    for line, ((before, guessed), (settled, found)) in enumerate(pairwise(rows)):
        for column in range(count):
            wrong = column < settled and guessed[column] != found[column] and column < count - 1
            kind = "settled before" if column < before else "wrong, and right now" if wrong else "a guess"
            kind = "came true" if kind == "a guess" and column < settled else kind
            color = COLORS[kind]
            axes.add_patch(plt.Rectangle((column, -line), 0.95, -0.9, facecolor=color, edgecolor="#888888", lw=0.5))
            token = found[column] if column < settled else guessed[column]
            label = repr(tokenizer.decode([int(token)]))[1:-1] if column < count - 1 else "answer"
            axes.text(column + 0.47, -line - 0.45, label, ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, count), ylim=(-len(rows) + 1, 0))
    axes.set_xticks(np.arange(count) + 0.5, [f"{t:.2f}" for t in times[:count]], fontsize=7)
    axes.set_yticks(-np.arange(len(rows) - 1) - 0.45, [f"pass {i + 1}" for i in range(len(rows) - 1)], fontsize=8)
    axes.set_xlabel("t of the evaluation", fontsize=8)
    for name, color in COLORS.items():
        axes.plot([], [], "s", color=color, markeredgecolor="#888888", label=name)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25 - 0.1 / len(rows)), ncol=4, fontsize=7, frameon=False)


if __name__ == "__main__":
    main()
