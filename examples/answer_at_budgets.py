"""Answers a question at several budgets, and prints what each answer costs.

    python examples/answer_at_budgets.py --model runs/quickstart --budget 1 3 15

The first answer at a budget also compiles, so each question is asked twice and the second time counts.
"""

import argparse
import time

import l2d_jax

QUESTION = "A bus goes 50 kilometers per hour for 2 hours and then another 20 kilometers. How many kilometers is that?"


def main() -> None:
    """Load the model once, then answer at each budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="runs/quickstart", help="a workdir, a model folder or a hub id")
    parser.add_argument("--prompt", default=QUESTION)
    parser.add_argument("--budget", type=int, nargs="+", default=[1, 3, 15])
    parser.add_argument("--max_new_tokens", type=int, default=80)
    options = parser.parse_args()
    model = l2d_jax.load(options.model)
    for budget in options.budget:
        settings = {"budget": budget, "max_new_tokens": options.max_new_tokens}
        tokens = model.trace(options.prompt, **settings)
        model.generate(options.prompt, **settings)
        began = time.perf_counter()
        answer = model.generate(options.prompt, **settings)
        seconds = time.perf_counter() - began
        passes = sum(token.passes for token in tokens) / max(len(tokens), 1)
        print(f"budget {budget} ({seconds:.2f} s, {passes:.2f} passes over the path's weights per token): {answer}")


if __name__ == "__main__":
    main()
