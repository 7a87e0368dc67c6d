"""How many problems a task has after the release's filters, compared with the paper's number.

The paper counts the problems that remain when its examples, repeated questions and prompts of more than 2048 tokens
(with their right answer) are dropped. Such a count depends on the tokenizer, so it is compared only with a tokenizer of
the paper's models, on the paper's split, and with its examples.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

END_TOKENS = {"<|eot_id|>": 128009, "<|im_end|>": 151645}  # ids of the ends of turn of Llama 3 and Qwen 2.5
LATER_TOKEN = "<think>"  # Qwen 3 has it among its tokens, and the paper's models do not


@dataclass(frozen=True)
class ProblemCounts:
    """The number of problems of a task, and of those dropped for their length, next to the paper's."""

    kept: int
    too_long: int  # prompt and right answer together exceed the release's 2048 tokens
    papers: int | None = None  # the paper's number; None: not known
    reason: str = ""  # why the number need not be the paper's; empty: it must be

    @property
    def verdict(self) -> str:
        """How the number compares with the paper's; empty if that is not known."""
        if self.papers is None:
            return ""
        if self.reason:
            return f"the paper has {self.papers}, which is not compared: {self.reason}"
        if self.kept == self.papers:
            return "as many as in the paper"
        return f"not the paper's {self.papers}: the rows, the tokenizer or its chat template are not the same"

    def __str__(self) -> str:
        found = f"{self.kept} problems, {self.too_long} dropped for their length"
        return ", ".join([found, *([self.verdict] if self.verdict else [])])

    def record(self) -> dict[str, Any]:
        """The entry of `results.json`."""
        numbers = {"problems": self.kept, "too long": self.too_long, "paper": self.papers}
        return {**numbers, "comparison": self.verdict or None}


def is_papers_tokenizer(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether a tokenizer has the vocabulary of the paper's models, Llama 3 or Qwen 2.5."""
    known = tokenizer.get_vocab()
    return LATER_TOKEN not in known and any(known.get(token) == number for token, number in END_TOKENS.items())


def differences(tokenizer: PreTrainedTokenizerFast, **options: Any) -> str:
    """Why a count need not be the paper's, with commas: options that differ from the task's, and another tokenizer.

    `options` maps the name of an option of the command line to its value; None or "paper": as in the paper.
    """
    reasons = [f"--{name} {value}" for name, value in options.items() if value not in (None, "paper")]
    return ", ".join([*reasons, *([] if is_papers_tokenizer(tokenizer) else ["another tokenizer"])])
