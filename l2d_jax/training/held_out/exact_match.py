"""Free-running accuracy: held-out problems are answered from the prompt alone, and the final words are compared.

Teacher-forced accuracy says how well a model continues a correct answer; this says how often its answers are correct.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import DataConfig, ValidationConfig
from l2d_jax.data.examples import Examples
from l2d_jax.data.word_problems import final_answer
from l2d_jax.decoding.batching import common_prefix, complete
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.statistics import BootstrapSums, rate

OPTION = "config.validation.exact_examples"  # the option for the number of problems


@dataclass(frozen=True)
class MarkedProblems:
    """Held-out prompts whose answers end in `#### ` and a word, or are a single word."""

    prompts: list[Prompt]
    wanted: list[str]  # final words, as `final_answer` reads them
    most_tokens: int  # limit for a model's answer: a quarter more than the longest correct one

    @classmethod
    def read(
        cls, config: DataConfig, tokenizer: PreTrainedTokenizerFast, *, count: int, option: str = OPTION
    ) -> "MarkedProblems":
        """Read at most `count` examples; raises `InputError`, which names `option`, for one without a final word."""
        config = replace(config, validation_examples=count)
        examples = Examples.load(config, tokenizer, split=config.validation_split)
        prompts, wanted, longest = [], [], 0
        for place, (prompt, answer) in enumerate(examples.texts()):
            word = final_answer(to_text(answer, tokenizer))
            if word is None:
                row = examples.turns[int(examples.kept[place])]["row"]
                rule = f"{option} needs answers that are one word, or end in '#### ' and a word, as GSM8K's do"
                raise InputError(f"{rule}: row {row} of the validation split has none; set it to 0")
            prompts.append(Prompt(place, prompt))
            wanted.append(word)
            longest = max(longest, len(answer))
        return cls(prompts, wanted, longest + longest // 4)


def exact_match(
    loaded: LoadedModel, problems: MarkedProblems, config: ValidationConfig, *, budgets: Sequence[int]
) -> dict[str, Any]:
    """The share of problems whose final word is right, at each budget n; only n = 1 if the model has no path.

    Keys: `validation/exact@n` for greedy answers, `…_interval` with Wilson's 95 % interval over problems, `…_gain` with
    the paired difference from the smallest budget and its bounds. `validation/sampled@n` has the same for
    `config.exact_samples` answers at temperature 1, with a bootstrap interval.
    """
    assert loaded.tokenizer is not None
    budgets = budgets if loaded.model.path is not None else (1,)
    length = min(loaded.defaults.max_new_tokens, problems.most_tokens)
    kinds = [kind for kind in (("exact", 0.0, 1), ("sampled", 1.0, config.exact_samples)) if kind[-1] > 0]
    right: dict[str, np.ndarray] = {}
    prompts = problems.prompts
    prefix = common_prefix([prompt.ids for prompt in prompts])
    with processes.progress_bar(len(prompts) * len(kinds) * len(budgets), "answers", unit="problem") as shown:
        for (kind, temperature, samples), budget in itertools.product(kinds, budgets):
            one = replace(loaded.defaults, temperature=temperature, max_new_tokens=length, budget=budget)
            scores = right[f"{kind}@{budget}"] = np.zeros(len(prompts))
            rows = max(min(config.exact_batch_size // samples, len(prompts)), 1) * samples
            for answers in complete(loaded, prompts, settings=one, batch_size=rows, samples=samples, prefix=prefix):
                for place, completions in answers.items():
                    found = [final_answer(to_text(completion.ids, loaded.tokenizer)) for completion in completions]
                    scores[place] = np.mean([word == problems.wanted[place] for word in found])
                shown.update(len(answers))
    sums, report = BootstrapSums(), dict[str, Any]()
    sums.add(np.ones((len(prompts), 1)), {name: scores[:, None] for name, scores in right.items()})
    for name, scores in right.items():
        measured = rate(scores.tolist())
        report |= {f"validation/{name}": measured.mean, f"validation/{name}_interval": [measured.low, measured.high]}
        report[f"validation/{name}_gain"] = sums.mean(name, minus=f"{name.partition('@')[0]}@{min(budgets)}")
    return report
