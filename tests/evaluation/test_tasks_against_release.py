"""Prompts and strict scores, compared with those that the authors' own code computes.

The comparison needs a checkout of the release (github.com/SakanaAI/L2D) and a folder of rows, as `evaluate --data_dir`
reads it; a split that is missing there is skipped, and HumanEval's rows are the checkout's own:

    L2D_RELEASE=CHECKOUT L2D_TASK_ROWS=FOLDER python -m pytest tests/evaluation/test_tasks_against_release.py

Nothing of the release but its task files and `benchmark.compute_metrics` is used.
"""

import gzip
import importlib
import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from l2d_jax.data.chat_template import render_template
from l2d_jax.evaluation.plan import choose_run
from l2d_jax.evaluation.sandbox.grade import unavailable
from l2d_jax.evaluation.tasks.problem import Problem
from l2d_jax.evaluation.tasks.task import find_task
from l2d_jax.weights.tokenizer_files import BASE_LLAMA

RELEASE, ROWS = os.environ.get("L2D_RELEASE"), os.environ.get("L2D_TASK_ROWS")
pytestmark = pytest.mark.skipif(not (RELEASE and ROWS), reason="L2D_RELEASE and L2D_TASK_ROWS name no folders")
COMPLETIONS = int(os.environ.get("L2D_TASK_COMPLETIONS", "2000"))  # made up for each task
SPLITS = [("gsm8k", "train"), ("math", "train"), ("mmlu", "dev"), ("mmlu", "validation"), ("mmlu_pro", "validation")]
SPLITS += [("piqa", "train"), *[("mbpp", split) for split in ("train", "validation", "prompt")], ("humaneval", "test")]
SPLITS += [(f"arc_{kind}", split) for kind in ("easy", "challenge") for split in ("train", "validation")]
# The class of the release that reads a task's rows, and the data set, configuration and split that it is told.
READERS = {
    "gsm8k": ("GSM8kDataProcessor", "openai/gsm8k,main"),
    "math": ("MATHDataProcessor", "lighteval/MATH"),
    "mmlu": ("MMLUDataProcessor", "cais/mmlu,all"),
    "mmlu_pro": ("MMLUProDataProcessor", "TIGER-Lab/MMLU-Pro"),
    "piqa": ("PIQADataProcessor", "ybisk/piqa"),
    "mbpp": ("MBPPDataProcessor", "google-research-datasets/mbpp,full"),
    "humaneval": ("HumanEvalDataProcessor", "openai/openai_humaneval"),
    "arc_easy": ("ARCDataProcessor", "allenai/ai2_arc,ARC-Easy"),
    "arc_challenge": ("ARCDataProcessor", "allenai/ai2_arc,ARC-Challenge"),
}
# What completions are made of, beside right answers and parts of them.
PIECES = [
    "#### ",
    "####",
    "$",
    ".",
    ",",
    "-",
    "0.5",
    "12",
    " ",
    "\n",
    "The answer is ",
    "(",
    ")",
    "B",
    "C.",
    "\\boxed{",
    "}",
]
PIECES += ["\\frac{1}{2}", "\\dfrac12", "\\frac", "x=", "\\sqrt", "1/2", "\\text{ cm}", "%", "GLOB", "é", "A or "]


class Tokenizer:
    """Keeps the conversation that it is to encode."""

    conversation: list[dict[str, str]]

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> list[int]:
        self.conversation = conversation
        return []

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any) -> str:
        return ""


class Release(NamedTuple):
    """The release's modules."""

    tasks: Any
    benchmark: Any

    def asked(self, task: str, split: str, rows: list[dict[str, Any]]) -> list[tuple[list[dict[str, str]], Any]]:
        """The conversation of each row that it does not leave out, and the options of the answer."""
        name, place = READERS[task]
        config = Namespace(max_seq_len=10**9, num_few_shots=5, lad=False, specified_template_type=None)
        config.use_data_split_guidance = False
        tokenizer = Tokenizer()
        reader = getattr(self.tasks, name)(config, f"{place},{split}", tokenizer)
        items = ((reader.line2data(line), tokenizer) for line in enumerate(rows))
        return [(tokenizer.conversation, item[0].get("output_space")) for item, tokenizer in items if item is not None]

    def score(self, task: str, right: str, completion: str, options: Any) -> float:
        """Of one completion; 0 where its functions raise, which would end a whole evaluation."""
        name = {"math": "MATH", "arc_easy": "arc-easy", "arc_challenge": "arc-challenge"}.get(task, task)
        data = {"task_names": [name], "output_spaces": [options]}
        try:
            figures = self.benchmark.compute_metrics(
                data | {"ref_completions": [right], "hyp_completions": [completion]}, Namespace(lad=False)
            )[1]
        except (IndexError, OverflowError, ValueError):
            return 0.0
        return float(figures[f"{name}/accuracy"])


def read_rows(task: str, split: str) -> list[dict[str, Any]]:
    """Of the checkout's HumanEval, or of the folder."""
    if task == "humaneval":
        text = gzip.decompress((Path(str(RELEASE)) / "tasks" / "HumanEval.jsonl.gz").read_bytes()).decode()
    else:
        file = Path(str(ROWS)) / task / f"{split}.jsonl"
        if not file.exists():
            pytest.skip(f"no {file}")
        text = file.read_text()
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Release:
    """Its task files, with rows of the folder in place of the hub's, and nothing that models need."""

    def rows_of(name: str, subset: str | None = None, *, split: str, **_: Any) -> list[dict[str, Any]]:
        name = "lighteval/MATH" if name == "lightevalMATH" else name  # a slip of the release
        places = {place: task for task, (_, place) in READERS.items()}
        return read_rows(places[name if f"{name}" in places else f"{name},{subset}"], split)

    class Stub(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("pipeline", "training", "data"):
        monkeypatch.setitem(sys.modules, name, Stub(name))
    for name in ("tasks", "benchmark"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(RELEASE))
    monkeypatch.setattr("datasets.load_dataset", rows_of)
    for name in [name for name in sys.modules if name.startswith("tasks.")]:
        monkeypatch.delitem(sys.modules, name)
    return Release(importlib.import_module("tasks"), importlib.import_module("benchmark"))


def load(task: str, split: str, tmp_path: Path) -> list[Problem]:
    """Ours, of the same rows; those of a split that is all examples are asked as if they were of the paper's."""
    wanted = find_task(task)
    names = {split: split, wanted.shot_split: wanted.shot_split}
    if task in ("mmlu", "mmlu_pro", "piqa") and split == wanted.shot_split:
        names[wanted.split] = split
    (tmp_path / task).mkdir()
    for name, place in names.items():
        lines = (json.dumps(row) + "\n" for row in read_rows(task, place))
        (tmp_path / task / f"{name}.jsonl").write_text("".join(lines))
    return wanted.load(str(tmp_path), split=wanted.split if wanted.split in names else split)


@pytest.mark.parametrize(("task", "split"), SPLITS)
def test_prompts_are_those_of_the_release(release: Release, task: str, split: str, tmp_path: Path) -> None:
    rows = read_rows(task, split)
    theirs = [json.dumps(conversation) for conversation, _ in release.asked(task, split, rows)]
    ours = [json.dumps(list(problem.messages)) for problem in load(task, split, tmp_path)]
    assert set(ours) <= set(theirs)
    print(f"\n{task}/{split}: {len(ours)} prompts equal, of {len(rows)} rows; the release asks {len(theirs)}")


def test_the_format_for_base_models_is_that_of_the_release(release: Release) -> None:
    theirs = release.tasks.templates.template_type2template["base_llama"]
    draw = random.Random(0)
    for count in range(1, 24, 2):
        contents = draw.choices(["a", "  b\n", "\n{{ x }}", "\u00e9\n\n#### 5", " "], k=count)
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        variables = {"messages": messages, "add_generation_prompt": True, "eos_token": "<end>"}
        prompt = render_template(theirs, variables)
        assert render_template(BASE_LLAMA, variables) == prompt
        messages.append({"role": "assistant", "content": "4"})
        assert render_template(BASE_LLAMA, variables | {"add_generation_prompt": False}) == f"{prompt}4<end>"


def made_up(problem: Problem, draw: random.Random) -> str:
    """A completion of pieces, now and then the right answer or a part of it."""
    pieces = draw.choices(PIECES, k=draw.randrange(6))
    for _ in range(draw.randrange(3)):
        begin = draw.randrange(len(problem.answer))
        pieces.insert(draw.randrange(len(pieces) + 1), draw.choice([problem.answer, problem.answer[begin:]]))
    return "".join(pieces)


@pytest.mark.parametrize("task", [task for task in READERS if find_task(task).kind == "generate"])
def test_strict_scores_are_those_of_the_release(
    release: Release, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("l2d_jax.evaluation.tasks.math._parse", lambda text: [])  # the relaxed score, which takes time
    split = next(split for name, split in reversed(SPLITS) if name == task)
    rows = read_rows(task, split)
    options = {json.dumps(conversation): space for conversation, space in release.asked(task, split, rows)}
    problems = load(task, split, tmp_path)
    draw, right = random.Random(0), 0.0
    for _ in range(COMPLETIONS):
        problem = draw.choice(problems)
        completion = made_up(problem, draw)
        space = options[json.dumps(list(problem.messages))]
        [ours] = find_task(task).grade([problem], [completion])
        theirs = release.score(task, problem.answer, completion, space)
        assert (ours.strict, completion) == (theirs, completion)
        right += theirs
    assert 0 < right < COMPLETIONS
    print(f"\n{task}/{split}: {COMPLETIONS} strict scores equal, {right:.0f} of them 1")


def test_own_solutions_of_mbpp_are_right_as_in_the_release(tmp_path: Path) -> None:
    """The release runs a candidate and its tests as one program, without the setup code of the data set."""
    if reason := unavailable():
        pytest.skip(reason)
    rows = [row for name, split in SPLITS if name == "mbpp" for row in read_rows(name, split)]
    (tmp_path / "mbpp").mkdir()
    (tmp_path / "mbpp" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def passes(row: dict[str, Any]) -> bool:
        program = "\n".join([row["code"], *row["test_list"]])
        return subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, timeout=60).returncode == 0

    with ThreadPoolExecutor(2) as pool:
        theirs = {f"MBPP/{row['task_id']}" for row, passed in zip(rows, pool.map(passes, rows), strict=True) if passed}
    problems = find_task("mbpp").load(str(tmp_path), shots=0)
    scores = find_task("mbpp").grade(
        problems, [problem.answer for problem in problems], run=choose_run([find_task("mbpp")], is_allowed=True)
    )
    ours = {problem.id for problem, score in zip(problems, scores, strict=True) if score.strict}
    print(f"\nmbpp: {len(rows)} own solutions, right by the release {len(theirs)}, here {len(ours)}")
    assert theirs - ours == {"MBPP/601"}  # "not plain data: Pair"
    assert ours <= theirs
