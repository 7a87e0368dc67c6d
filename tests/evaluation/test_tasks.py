"""The evaluation tasks: what is read, what is asked, and what a completion is worth."""

import doctest
import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from l2d_jax.config.schema import CATEGORIES
from l2d_jax.data import word_problems
from l2d_jax.data.tokenizer import byte_tokenizer, prompt_ids
from l2d_jax.errors import InputError
from l2d_jax.evaluation import tasks
from l2d_jax.evaluation.tasks.problem import TaskSampling
from l2d_jax.evaluation.tasks.task import TASKS, Task, encode_problems, find_task
from tests.support.programs import ROOT
from tests.support.task_rows import READ, ROWS, split_rows, varied, write

PAPER = list(TASKS.values())[:9]  # in its order
DATA = ROOT.parent / "shared" / "data"


def test_every_docstring_says_what_happens() -> None:
    modules = [f"l2d_jax.evaluation.tasks.{module.name}" for module in pkgutil.iter_modules(tasks.__path__)]
    results = [
        doctest.testmod(importlib.import_module(name))
        for name in (*modules, "l2d_jax.statistics", "l2d_jax.data.word_problems")
    ]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 20


# --- prompts: expected texts are written by hand, after the release's ---

QUESTIONS = {
    "gsm8k": "1 + 1? 100",
    "math": "$1 + 1$? 100",
    "mmlu": "Question:\n1 + 1? 100\nChoices:\nA. 1\nB. 2\nC. 3\nD. 4\n\nAnswer:",
    "mmlu_pro": "Question:\n1 + 1? 100\nChoices:\nA. 0\nB. 1\nC. 2\nD. 3\nE. 4\nF. 5\nG. 6\nH. 7\nI. 8\nJ. 9\n",
    "piqa": "Goal:\nEat soup. 100\nOptions:\nA. Use a fork.\nB. Use a spoon.\n\nAnswer:",
    "arc_easy": "Question:\n1 + 1? 100\nChoices:\n1. 1\n2. 2\n\nAnswer:",
    "arc_challenge": "Question:\n1 + 1? 100\nChoices:\nA. 1\nB. 2\n\nAnswer:",
    "mbpp": '"""\nAdd one. 100\nassert inc(1) == 2\n"""\n',
    "humaneval": 'import re\n\n\ndef inc(x):\n    """Add one."""\n 5',
    "instructhumaneval": "Write inc. 5",
}
ANSWERS = {
    "gsm8k": "It is <<1+1=2>>2.\n#### 2",
    "math": "$\\boxed{2}$",
    "mmlu": "B",
    "mmlu_pro": "C",
    "piqa": "B",
    "arc_easy": "2",
    "arc_challenge": "B",
    "mbpp": "import sys\r\ndef inc(x):\r\n    return x + 1",
    "humaneval": "    return x + 1\n",
    "instructhumaneval": "import re\n\n\ndef inc(x):\n    return x + 1\n",
}


@pytest.mark.parametrize("name", READ)
def test_a_prompt_is_five_examples_and_the_question(name: str, tmp_path: Path) -> None:
    problems = find_task(name).load(split_rows(tmp_path, name))
    messages = list(problems[0].messages)
    if name == "instructhumaneval":
        assert messages.pop() == {"role": "assistant", "content": "import re\n\n\ndef inc(x):\n"}
    assert messages[-1] == {"role": "user", "content": QUESTIONS[name]}
    scored = QUESTIONS[name].count("100") or None
    for number, (user, assistant) in enumerate(zip(messages[:-1:2], messages[1::2], strict=True)):
        expected = QUESTIONS[name].replace("100", str(number)) if scored else f"{QUESTIONS[name][:-1]}{number}"
        assert (user, assistant) == (
            {"role": "user", "content": expected},
            {"role": "assistant", "content": ANSWERS[name]},
        )
    assert len(messages) == 11
    assert len(problems) == (4 if "humaneval" in name else 3)  # of 9 rows the first five are examples
    assert all(problem.category in CATEGORIES for problem in problems)


def test_examples_of_mathematics_are_equally_spaced(tmp_path: Path) -> None:
    [problem] = find_task("math").load(split_rows(tmp_path, "math", examples=14, scored=1))
    asked = [message["content"] for message in problem.messages[:-1:2]]
    assert asked == [f"$1 + 1$? {number}" for number in (0, 2, 4, 6, 8)]


def test_examples_are_of_the_question_s_subject(tmp_path: Path) -> None:
    rows = [varied("mmlu", number) | {"subject": ("law", "anatomy")[number % 2]} for number in range(14)]
    write(tmp_path, "mmlu", "dev", rows)
    [problem] = find_task("mmlu").load(write(tmp_path, "mmlu", "test", [ROWS["mmlu"]]))
    asked = [message["content"].split("\n")[1] for message in problem.messages[:-1:2]]
    assert asked == [f"1 + 1? {number}" for number in (1, 3, 5, 7, 9)]
    data = write(tmp_path, "mmlu", "test", [ROWS["mmlu"] | {"subject": "art"}])
    with pytest.raises(InputError, match=r"'dev' of mmlu has no example of 'art': add some"):
        find_task("mmlu").load(data)


def test_what_is_asked_in_an_example_is_not_scored(tmp_path: Path) -> None:
    data = split_rows(tmp_path, "gsm8k", examples=9)
    assert [problem.id for problem in find_task("gsm8k").load(data, split="train")] == [
        f"gsm8k/train/{n}" for n in (5, 6, 7, 8)
    ]
    data = write(tmp_path, "gsm8k", "test", [varied("gsm8k", 0)])  # the release counts it, in another split
    assert len(find_task("gsm8k").load(data)) == 1
    rows = [varied("mbpp", number) | {"task_id": number} for number in range(7)]
    data = split_rows(tmp_path, "mbpp")
    write(tmp_path, "mbpp", "test", rows)
    assert [problem.id for problem in find_task("mbpp").load(data)] == ["MBPP/5", "MBPP/6"]


def test_rows_that_the_release_does_not_count_are_left_out(tmp_path: Path) -> None:
    data = split_rows(tmp_path, "math")
    write(tmp_path, "math", "test", [ROWS["math"] | {"solution": "\\boxed 2 for {x}"}, ROWS["math"]])
    assert [problem.id for problem in find_task("math").load(data)] == ["math/test/1"]


def test_a_limit_is_spread_over_the_split(tmp_path: Path) -> None:
    data = split_rows(tmp_path, "gsm8k", scored=10)
    ids = [problem.id for problem in find_task("gsm8k").load(data, limit=4)]
    assert ids == [f"gsm8k/test/{number}" for number in (0, 2, 5, 7)]
    assert len(find_task("gsm8k").load(data, limit=40)) == 10


def test_the_classes_of_guidance_are_those_of_the_release(tmp_path: Path) -> None:
    rows = [
        ROWS["mmlu"] | {"subject": subject}
        for subject in ("anatomy", "abstract_algebra", "high_school_computer_science")
    ]
    write(tmp_path, "mmlu", "dev", rows)
    problems = find_task("mmlu").load(write(tmp_path, "mmlu", "test", rows))
    assert [problem.category for problem in problems] == ["general_qa", "math", "coding"]
    assert {task.name: task.category for task in PAPER if task.category != "general_qa"} == {
        "gsm8k": "math",
        "math": "math",
        "instructhumaneval": "coding",
        "mbpp": "coding",
    }


def test_completions_are_drawn_as_in_the_release() -> None:
    short = TaskSampling(max_new_tokens=256, samples=1, temperature=1.0, velocity_temperature=0.0, anneal=False)
    code = TaskSampling(max_new_tokens=512, samples=10, temperature=1.0, velocity_temperature=1.0, anneal=True)
    assert {task.kind: task.sampling for task in PAPER} == {"generate": short, "code": code}
    assert find_task("gsm8k").sampling_for("thoughts").temperature == 0


# --- prompts with thoughts ---


def test_thoughts_are_shown_or_asked_for(tmp_path: Path) -> None:
    [problem] = find_task("gsm8k").load(split_rows(tmp_path, "gsm8k", examples=9, scored=1), prompts="thoughts")
    assert len(problem.messages) == 17
    [problem] = find_task("mmlu_pro").load(split_rows(tmp_path, "mmlu_pro", scored=1), prompts="thoughts")
    assert problem.messages[1]["content"] == "Let's think step by step. It is 2. The answer is (C)."
    [problem] = find_task("piqa").load(split_rows(tmp_path, "piqa", scored=1), prompts="thoughts")
    [message] = problem.messages
    assert message["content"].startswith("Goal:\nEat soup. 100\nOptions:\nA. Use a fork.\nB. Use a spoon.\n\nThink")
    with pytest.raises(InputError, match=r"piqa has no examples with thoughts: give 0 shots"):
        find_task("piqa").load(split_rows(tmp_path, "piqa"), prompts="thoughts", shots=5)


CODE_REQUEST = (
    "\nThink step by step. Then end with the whole program in one block that begins with ```python and ends with ```."
)
ASKED = {  # with prompts "reasoning", and for code also with "thoughts"
    "gsm8k": '1 + 1? 100\nThink step by step. Then end with "#### " and the number.',
    "math": "$1 + 1$? 100\nThink step by step. Then put the final answer in \\boxed{}.",
    "mbpp": f'"""\nAdd one. 100\nassert inc(1) == 2\n"""{CODE_REQUEST}',
    "humaneval": f"Complete this program:\n```python\n{QUESTIONS['humaneval'][:-1]}0```{CODE_REQUEST}",
    "instructhumaneval": f"Write inc. 0{CODE_REQUEST}",
}


@pytest.mark.parametrize("name", ASKED)
def test_thoughts_are_asked_for_without_examples(name: str, tmp_path: Path) -> None:
    """For programs because no data set has examples with thoughts, and for models that think at length everywhere."""
    task = find_task(name)
    for prompts in ("thoughts", "reasoning") if task.kind == "code" else ("reasoning",):
        first, *others = task.load(split_rows(tmp_path, name), prompts=prompts)
        assert first.messages == ({"role": "user", "content": ASKED[name]},)
        assert len(others) == (8 if "humaneval" in name else 2)  # no row is an example
    assert "Think step by step" not in task.load(split_rows(tmp_path, name))[0].messages[-1]["content"]


def test_thoughts_of_thousands_of_tokens_are_sampled() -> None:
    for task in PAPER:
        sampling = task.sampling_for("reasoning")
        assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (4096, 0.6, 0.95)
        assert task.sampling_for("thoughts").max_new_tokens == (1024 if task.kind == "code" else 512)
        assert task.sampling.top_p is None  # as configured


# --- lengths ---


def test_prompts_that_are_too_long_with_their_answer_are_dropped(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    problems = find_task("gsm8k").load(split_rows(tmp_path, "gsm8k", scored=2), shots=0)
    length = len(prompt_ids(problems[0].messages, tokenizer)) + len(problems[0].answer)
    pairs = encode_problems(problems, tokenizer, max_length=length)
    assert [problem for problem, _ in pairs] == problems
    assert tokenizer.decode(pairs[1][1]).endswith("1 + 1? 101<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(InputError, match=rf"no prompt has at most {length - 1} tokens, they take {length} or more"):
        encode_problems(problems, tokenizer, max_length=length - 1)


def test_an_opening_is_continued(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    problems = find_task("instructhumaneval").load(split_rows(tmp_path, "instructhumaneval"), shots=0)
    text = tokenizer.decode(encode_problems(problems, tokenizer)[0][1])
    assert text.endswith("Write inc. 0<|im_end|>\n<|im_start|>assistant\nimport re\n\n\ndef inc(x):")


# --- bad input ---


def test_an_unknown_task_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown task 'gsm8': did you mean 'gsm8k'\?"):
        find_task("gsm8")


BAD = [
    ("gsm8k", {"answer": "2"}, r"the answer must end with '#### ' and a number, got '2'"),
    ("gsm8k", {"question": None}, r"'question' must be text, got None"),
    ("mmlu", {"answer": 4}, r"the answer must be the number of an option, 0 to 3, got 4"),
    ("mmlu", {"choices": []}, r"'choices' must be a list of texts, got \[\]"),
    ("piqa", {"label": -1}, r"the answer must be the number of an option, 0 to 1, got -1"),
    ("mmlu_pro", {"options": ["x"] * 11}, r"at most 10 options, A to J, but here are 11"),
    ("arc_easy", {"answerKey": "C"}, r"the answer must be one of the labels 1, 2, got 'C'"),
    ("arc_easy", {"choices": {"label": ["A"], "text": ["x", "y"]}}, r"a label of one character, got \['A'\] for 2"),
    ("mbpp", {"test_list": ["assert True"]}, r"the tests must call a function of 'code'"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD)
def test_a_bad_row_is_named(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    split_rows(tmp_path, name)
    task = find_task(name)
    data = write(tmp_path, name, task.split, [ROWS[name] | change])
    with pytest.raises(InputError, match=rf"^row 0 of {name}/{task.split} \(the first is 0\): .*{message}"):
        task.load(data)


@pytest.mark.parametrize("name", READ)
def test_a_missing_column_is_named(name: str, tmp_path: Path) -> None:
    column = find_task(name).columns[-1]
    split_rows(tmp_path, name)
    row = {key: value for key, value in ROWS[name].items() if key != column}
    data = write(tmp_path, name, find_task(name).split, [row])
    with pytest.raises(InputError, match=rf"need the columns .*, but {column} is missing among"):
        find_task(name).load(data)


def test_the_built_in_problems_need_no_rows(tmp_path: Path) -> None:
    """They are the held-out ones, asked as in training, and scored as GSM8K's."""
    task = find_task("word_problems")
    found = task.load(str(tmp_path), limit=10)
    task.check_size(task.load())
    made = [word_problems.problem(index, split="test") for index in range(0, 1000, 100)]
    assert [problem.messages for problem in found] == [({"role": "user", "content": one.question},) for one in made]
    right, wrong = [one.solution for one in made], [one.solution + "1" for one in made]
    assert [score.strict for score in task.grade(found, right)] == [1.0] * 10
    assert [score.strict for score in task.grade(found, wrong)] == [0.0] * 10
    assert task.load(shots=1)[0].messages[1]["content"] == word_problems.problem(0).solution
    with pytest.raises(InputError, match="splits train, validation, test, not 'dev'"):
        task.load(split="dev")


def test_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    data = split_rows(tmp_path, "gsm8k")
    for options, message in ({"limit": 0}, "limit of gsm8k must be at least 1"), ({"shots": -1}, "at least 0, got -1"):
        with pytest.raises(InputError, match=message):
            find_task("gsm8k").load(data, **options)
    with pytest.raises(InputError, match=r"split 'train' of gsm8k has no rows other than the examples"):
        find_task("gsm8k").load(data, split="train", shots=6)
    with pytest.raises(InputError, match=r"no split 'dev' in .*gsm8k"):
        find_task("gsm8k").load(data, split="dev")
    write(tmp_path, "piqa", "validation", [ROWS["piqa"]] * 1839)
    with pytest.raises(InputError, match=r"split 'validation' of ybisk/piqa has 1838 rows, but .* has 1839"):
        find_task("piqa").load(data, shots=0)


def test_the_hub_is_asked_for_the_paper_s_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, subset: str | None, *, split: str, revision: str | None) -> None:
        asked.append((name, subset, split, revision))
        raise ConnectionError("no network")

    monkeypatch.setattr("datasets.load_dataset", load)
    for task in map(find_task, READ):
        with pytest.raises(InputError, match=rf"data set '{task.hub}'.*no network.*--data_dir"):
            task.load(shots=0)
    assert asked[6:8] == [
        ("ybisk/piqa", None, "validation", "refs/convert/parquet"),
        ("allenai/ai2_arc", "ARC-Easy", "test", None),
    ]


# --- sizes, on the rows that are here ---


def test_sizes_are_those_of_the_data_sets() -> None:
    sizes = [task.size for task in PAPER]
    assert sizes == [1319, None, 159, None, 14042, 12032, 1838, 2376, 1172]
    for task in PAPER:
        examples = task.shots if task.split == task.shot_split else 0
        assert task.size is None or task.size == task.rows[task.split] - examples


def test_a_part_of_the_problems_is_told_from_all(tmp_path: Path) -> None:
    problems = find_task("piqa").load(split_rows(tmp_path, "piqa"))
    find_task("piqa").check_size(problems * 612 + problems[:2])
    find_task("math").check_size(problems)
    with pytest.raises(InputError, match=r"piqa has 1838 problems, but 3 were read"):
        find_task("piqa").check_size(problems)


REAL = [("gsm8k", "train", 7468), ("math", "train", 19), ("mmlu", "validation", 1531), ("mbpp", "validation", 90)]
REAL += [("arc_easy", "validation", 565), ("arc_challenge", "validation", 294)]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the rows of shared/data")
@pytest.mark.parametrize(("name", "split", "count"), REAL)
def test_real_rows_are_read_whole(name: str, split: str, count: int) -> None:
    task: Task = find_task(name)
    problems = task.load(str(DATA), split=split)
    assert len({problem.id for problem in problems}) == len(problems) == count
    if task.kind == "generate":  # what is right by the data set is right by both rules
        few = problems[:300]
        scores = task.grade(few, [problem.answer for problem in few])
        assert [(score.strict, score.relaxed, score.reason) for score in scores] == [(1, 1, "")] * len(few)
