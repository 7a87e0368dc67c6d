"""A task: how the rows of a data set become conversations, and how completions are scored.

A completion gets two scores. The *strict* one is that of the authors' release
(github.com/SakanaAI/L2D: `tasks/*.py`, `benchmark.py`, `benchmark_code.py`) with all its quirks, for figures that
compare with the paper's; the *relaxed* one asks whether a reader would call the answer right.

>>> find_task("gsm8k").size
1319
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any, Literal

import datasets
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.parsing import nearest
from l2d_jax.data.rows import find_files, read_files, read_hub, require_columns
from l2d_jax.data.tokenizer import prompt_ids, text_ids
from l2d_jax.errors import InputError, require
from l2d_jax.evaluation.sandbox.submission import Submission
from l2d_jax.evaluation.tasks import code, gsm8k, math, multiple_choice
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Item, Problem, Prompts, Row, Run, Score, TaskSampling
from l2d_jax.files import package_table

MAX_LENGTH = 2048  # tokens of a prompt and its right answer together: the release's max_seq_len
# For prompts with thoughts; the lengths are our choice. The temperature and top-p are those of R1's model card.
GREEDY = TaskSampling(max_new_tokens=512, temperature=0.0)
GREEDY_CODE = GREEDY._replace(max_new_tokens=1024)
REASONING = TaskSampling(max_new_tokens=4096, temperature=0.6, top_p=0.95)


@dataclass(frozen=True)
class Task:
    """A data set, the wording of its rows, and the rules of its scores."""

    name: str
    hub: str  # id of the data set on the hub
    columns: Sequence[str]  # columns that every row must have
    shot_split: str  # split from which the examples of a prompt are taken
    rows: Mapping[str, int]  # number of rows of each complete split
    word: Callable[[Row], Item]  # puts a row into the release's wording; raises `InputError`
    make: Callable[[str], list[Row]] | None = None  # makes the rows of a split; None: rows are read
    split: str = "test"  # the split that the paper scores
    subset: str | None = None  # on the hub; None: there is only one
    revision: str | None = None  # on the hub; None: the newest
    judge: Callable[[Problem, str], Score] | None = None  # scores a text completion; None: completions are programs
    candidates: Callable[[Problem, str], tuple[str, str]] | None = None  # the strict and the relaxed program
    category: str = "general_qa"  # class for guidance
    shots: int = 5  # examples before each question
    is_spaced: bool = False  # whether examples are evenly spaced in their split, instead of its first rows
    by_subject: bool = False  # whether examples have the question's subject
    thought_shots: int = 0  # examples with prompts "thoughts"; 0: the question asks for thoughts instead
    request: str = ""  # follows the question with prompts "reasoning", for a task whose questions have no `request`
    sampling: TaskSampling = field(default_factory=TaskSampling)
    counts_all: bool = True  # whether every row of the paper's split is a problem or an example
    papers: int | None = None  # the paper's number of problems after all filters; None: not known

    @property
    def kind(self) -> Literal["generate", "code"]:
        """The kind of its completions: text, or programs to run."""
        return "code" if self.judge is None else "generate"

    @property
    def size(self) -> int | None:
        """The number of problems in the paper's split, before long ones are dropped; None: not known."""
        examples = self.shots if self.split == self.shot_split else 0
        return self.rows[self.split] - examples if self.counts_all else None

    def sampling_for(self, prompts: Prompts = "paper") -> TaskSampling:
        """How completions of these prompts are sampled."""
        greedy = GREEDY_CODE if self.kind == "code" else GREEDY
        return {"paper": self.sampling, "thoughts": greedy, "reasoning": REASONING}[prompts]

    def load(
        self,
        data_dir: str | None = None,
        *,
        limit: int | None = None,
        split: str | None = None,
        shots: int | None = None,
        prompts: Prompts = "paper",
    ) -> list[Problem]:
        """Read the problems of a split, in order: at most `limit` of them, evenly spaced.

        Rows that serve as examples are not problems, nor are rows whose right answer the strict rules cannot read: the
        release counts neither. Rows come from `<data_dir>/<name>/<split>.jsonl` or `.parquet`, or from the hub.
        Raises `InputError` for missing or malformed data, and for an option that does not fit the task.
        """
        for option, value, least in (("limit", limit, 1), ("shots", shots, 0)):
            fits = value is None or value >= least
            require(fits, f"{option} of {self.name} must be at least {least}, got {value}")
        split = split or self.split
        usual = {"paper": self.shots, "thoughts": self.thought_shots, "reasoning": 0}[prompts]
        folder = None if data_dir is None else Path(data_dir, self.name)
        groups = self._examples(folder, usual if shots is None else shots)
        problems = []
        for number, row in enumerate(self._read(split, folder)):
            item = self._word(row, split, number)
            before = groups.get(item.subject if self.by_subject else None, {})
            if groups and not before:
                raise InputError(f"{self.shot_split!r} of {self.name} has no example of {item.subject!r}: add some")
            is_example = split == self.shot_split and number in before
            is_repeated = self.kind == "code" and any(item.question == one.question for one in before.values())
            if not (is_example or is_repeated or item.reference is None):
                problems.append(self._problem(item, before, f"{self.name}/{split}/{number}", prompts))
        require(problems != [], f"split {split!r} of {self.name} has no rows other than the examples: choose another")
        count = min(len(problems), limit or len(problems))
        return [problems[index * len(problems) // count] for index in range(count)]

    def check_size(self, problems: Sequence[Problem]) -> None:
        """Raise `InputError` if the number of problems differs from that of the paper's split, if that is known."""
        problem = f"{self.name} has {self.size} problems, but {len(problems)} were read"
        remedy = "get its rows again, or report the figure as that of a part"
        require(self.size is None or len(problems) == self.size, f"{problem}: {remedy}")

    def grade(
        self,
        problems: Sequence[Problem],
        completions: Sequence[str],
        *,
        run: Run | None = None,
        tagged: bool = False,
        prompts: Prompts = "paper",
    ) -> list[Score]:
        """Score one completion per problem. An empty one, or one with invalid unicode (lone surrogates), scores 0.

        If `tagged`, only the text between `<answer>` tags or after `</think>` counts. After prompts with thoughts, a
        program is the last block of code. Code tasks need `run`, which runs programs; without it they raise
        `InputError`.
        """
        assert len(problems) == len(completions)
        texts = [answer_part(completion) if tagged else completion for completion in completions]
        texts = [code.last_fenced(text) for text in texts] if self.kind == "code" and prompts != "paper" else texts
        faults = list(map(_fault, texts))
        rest = [(problem, text) for problem, text, fault in zip(problems, texts, faults, strict=True) if not fault]
        found: Iterator[Score]
        if self.judge is not None:
            found = starmap(self.judge, rest)
        elif run is None or self.candidates is None:
            raise InputError(f"{self.name} runs generated code: allow it with --allow_code_execution")
        else:
            found = score_programs([problem for problem, _ in rest], list(starmap(self.candidates, rest)), run)
        return [Score(0.0, 0.0, None, None, fault) if fault else next(found) for fault in faults]

    def _read(self, split: str, folder: Path | None) -> datasets.Dataset:
        """Read and check the rows of a split: built in, from a file in a folder, or from the hub."""
        if self.make is not None:
            return datasets.Dataset.from_list(self.make(split))
        if folder is None:
            place, remedy = self.hub, "check the network, or put the rows into a folder and give it with --data_dir"
            rows = read_hub(self.hub, self.subset, split=split, revision=self.revision, remedy=remedy)
        else:
            files = find_files(folder, split)
            place, rows = str(files[0]), read_files(files)
        require_columns(rows, self.columns, name=place)
        known = self.rows.get(split, len(rows))
        is_whole = len(rows) == known or (folder is not None and len(rows) < known)
        require(is_whole, f"split {split!r} of {self.hub} has {known} rows, but {place} has {len(rows)}: get it again")
        return rows

    def _examples(self, folder: Path | None, count: int) -> dict[str | None, dict[int, Item]]:
        """The rows that serve as examples, by group and row number: the first `count` of each group."""
        groups: defaultdict[str | None, dict[int, Item]] = defaultdict(dict)
        if count == 0:
            return groups
        rows = self._read(self.shot_split, folder)
        step = max(1, len(rows) // count) if self.is_spaced else 1
        for number in range(0, len(rows), step):
            item = self._word(rows[number], self.shot_split, number)
            group = groups[item.subject if self.by_subject else None]
            if len(group) < count:
                group[number] = item
            elif not self.by_subject:
                break
        return groups

    def _word(self, row: Row, split: str, number: int) -> Item:
        try:
            return self.word(row)
        except InputError as error:
            raise InputError(f"row {number} of {self.name}/{split} (the first is 0): {error}") from error

    def _problem(self, item: Item, before: Mapping[int, Item], name: str, prompts: Prompts) -> Problem:
        messages = []
        for example in before.values():
            answer = example.opening + example.answer if prompts == "paper" else example.thought
            if answer is None:
                raise InputError(f"{self.name} has no examples with thoughts: give 0 shots, or use the prompts 'paper'")
            messages += [("user", example.question), ("assistant", answer)]
        question = item.question
        if prompts != "paper" and not before:
            question = item.request or question + (self.request if prompts == "reasoning" else "")
        messages.append(("user", question))
        if item.opening and prompts == "paper":
            messages.append(("assistant", item.opening))
        prompt = tuple({"role": role, "content": content} for role, content in messages)
        category = item.category or self.category
        return Problem(item.id or name, prompt, item.answer, item.reference, category, item.subject, item.options)


RULES: dict[str, dict[str, Any]] = {**gsm8k.RULES, **math.RULES, **code.RULES, **multiple_choice.RULES}
TASKS = {
    name: Task(name, **RULES[name], **facts | {"sampling": TaskSampling(**facts.get("sampling", {}))})
    for name, facts in package_table("evaluation/tasks/tasks.toml").items()
}


def find_task(name: str) -> Task:
    """The task of this name; raises `InputError` for an unknown name."""
    require(name in TASKS, f"unknown task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]


def encode_problems(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast, *, max_length: int = MAX_LENGTH
) -> list[EncodedProblem]:
    """Encode the problems that, with their right answer, have at most `max_length` tokens.

    Raises `InputError` if there are none.
    """
    answers = text_ids([problem.answer for problem in problems], tokenizer)
    pairs = [EncodedProblem(problem, prompt_ids(problem.messages, tokenizer)) for problem in problems]
    lengths = [len(ids) + len(answer) for (_, ids), answer in zip(pairs, answers, strict=True)]
    least, remedy = min(lengths), "use fewer shots, or raise the limit"
    require(least <= max_length, f"no prompt has at most {max_length} tokens, they take {least} or more: {remedy}")
    return [pair for pair, length in zip(pairs, lengths, strict=True) if length <= max_length]


def score_programs(problems: Sequence[Problem], pairs: Sequence[tuple[str, str]], run: Run) -> Iterator[Score]:
    """Score completions by running the strict and the relaxed candidate of each pair; equal candidates run once."""
    places = [(number, candidate) for number, pair in enumerate(pairs) for candidate in dict.fromkeys(pair)]
    programs = [Submission(candidate, *problems[number].reference) for number, candidate in places]
    verdicts = dict(zip(places, run(programs), strict=True))
    for number, pair in enumerate(pairs):
        strict, relaxed = (verdicts[number, candidate] for candidate in pair)
        reason = "" if strict.passed else str(strict.reason)
        yield Score(float(strict.passed), float(strict.passed or relaxed.passed), *pair, reason)


def _fault(text: str) -> str:
    """Why a completion cannot be judged; empty if it can."""
    return "empty" if not text.strip() else "broken unicode" if re.search("[\ud800-\udfff]", text) else ""


def answer_part(completion: str) -> str:
    """The text in the last `<answer>…</answer>`, else after the last `</think>`, else the whole completion.

    >>> answer_part("<think>2 + 2 is 4.</think><answer> 4 </answer>")
    '4'
    >>> answer_part("2 + 2 is 4.</think>The answer is 4.")  # the prompt has opened the thinking
    'The answer is 4.'
    >>> answer_part("<think>2 + 2 is")
    ''
    """
    behind = completion.rpartition("</think>")[2]
    answers = re.findall(r"<answer>(.*?)(?:</answer>|$)", behind, flags=re.DOTALL)
    if answers:
        return str(answers[-1]).strip()
    return "" if "<think>" in behind else behind.strip()
