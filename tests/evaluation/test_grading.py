"""What completions are worth: the strict rules, which are the release's, and the relaxed ones."""

from collections.abc import Sequence
from typing import Any

import pytest

from l2d_jax.errors import InputError
from l2d_jax.evaluation.sandbox.submission import Submission, Verdict
from l2d_jax.evaluation.tasks.problem import Problem, Score
from l2d_jax.evaluation.tasks.task import answer_part, find_task
from tests.support.task_rows import READ, ROWS


def problem(name: str, **changes: Any) -> Problem:
    """That of the made-up row, without examples."""
    item = find_task(name).word(ROWS[name] | changes)
    return Problem("p", (), item.answer, item.reference, "other", options=item.options)


def grade(name: str, completion: str, **changes: Any) -> Score:
    """Of one completion."""
    [score] = find_task(name).grade([problem(name, **changes)], [completion])
    return score


# --- GSM8K; the right answer is 2, or 1200 ---


@pytest.mark.parametrize(
    ("completion", "extracted", "strict", "relaxed"),
    [
        ("So 2.\n#### 2", "2", 1, 1),
        ("#### 2 apples", "2", 1, 1),
        ("#### 2\n#### 3", "2", 1, 0),  # the first counts; a reader takes the last
        ("#### 3\n#### 2", "3", 0, 1),
        ("#### 2.", "2.", 0, 1),  # compared as text, with the full stop
        ("#### 2.0", "2.0", 0, 1),
        ("#### ,2", "2", 1, 1),
        ("####2", None, 0, 1),
        ("#### $2", None, 0, 1),
        ("#### -2", "-2", 0, 0),
        ("#### ...", "...", 0, 0),
        ("The answer is 2. In other words, 4 / 2.", None, 0, 1),
        ("It is 2", None, 0, 1),
        ("5-2", None, 0, 1),  # not -2
        ("none", None, 0, 0),
    ],
)
def test_gsm8k(completion: str, extracted: str | None, strict: int, relaxed: int) -> None:
    score = grade("gsm8k", completion)
    assert (score.extracted, score.strict, score.relaxed) == (extracted, strict, relaxed)
    assert (score.reason == "") == (strict == relaxed == 1)


def test_commas_in_numbers_do_not_count() -> None:
    answer = {"answer": "x\n#### 1,200"}
    assert grade("gsm8k", "#### 1200", **answer).strict == 1
    assert grade("gsm8k", "#### 12,00", **answer)[:2] == (1, 1)
    assert grade("gsm8k", "That is $1,200.00.", **answer)[:2] == (0, 1)


# --- choices; the right one of A to D is B ---


@pytest.mark.parametrize(
    ("completion", "extracted", "strict", "relaxed"),
    [
        ("B", "B", 1, 1),
        ("(B)", "B", 1, 1),
        ("B. 2", "B", 1, 1),
        ("b", None, 0, 1),
        ("B2", None, 0, 0),
        ("E", None, 0, 0),
        ("GLOB", "B", 1, 0),  # the last letter of a word counts, as in the release
        ("A or B", "A", 0, 0),
        ("A good question. The answer is B", "A", 0, 1),
        ("Answer: **B**", "B", 1, 1),
        ("So \\boxed{B}", "B", 1, 1),
        ("The answer is A. No, the answer is (B).", "A", 0, 1),
        ("2", None, 0, 1),  # the text of the option
        ("I do not know", None, 0, 0),
        ("Bé", "B", 1, 0),  # é is no letter for the release
    ],
)
def test_choices(completion: str, extracted: str | None, strict: int, relaxed: int) -> None:
    score = grade("mmlu", completion)
    assert (score.extracted, score.strict, score.relaxed) == (extracted, strict, relaxed)


def test_letters_are_those_of_the_question() -> None:
    assert grade("mmlu_pro", "J. or C.").extracted == "J"
    assert grade("mmlu", "J. or B.").extracted == "B"
    assert grade("piqa", "C. or B.").extracted == "B"
    assert grade("arc_easy", "A, so 2.")[:3] == (1, 0, "2")  # its labels are 1 and 2


# --- MATH ---


@pytest.mark.parametrize(
    ("right", "completion", "strict", "relaxed"),
    [
        ("\\frac{1}{2}", "\\boxed{\\dfrac12}", 1, 1),
        ("\\frac{1}{2}", "It is 0.5.", 1, 1),
        ("\\frac{1}{2}", "It is 0.4.", 1, 0),  # 0.8 rounds to 1
        ("0.5", "\\boxed{1/2}", 1, 1),
        ("0.25", "\\boxed{\\frac{1}{4}}", 1, 1),
        ("-5", "It is -5.", 0, 1),  # the last number has no sign
        ("5", "It is -5.", 1, 0),
        ("5", "\\boxed{5}, no, \\boxed{6}", 0, 0),
        ("5", "\\boxed{xy = 5}", 0, 1),
        ("5", "\\boxed{x=5}", 1, 1),
        ("10", "\\boxed{10\\%}", 1, 1),
        ("1,000", "\\boxed{1000}", 1, 1),
        ("(1,2)", "\\boxed{\\left(1, 2\\right)}", 1, 1),
        ("x+1", "\\boxed{1+x}", 0, 1),
        ("5", "\\boxed 5", 1, 1),  # no closed box, so the last number
        ("5", "\\fbox{5}", 0, 0),  # as if it said nothing
        ("5", "\\boxed{\\frac}", 0, 0),  # the release's functions raise
        ("5", "\\boxed{inf}", 0, 0),
        ("\\frac{1}{2}", "\\boxed{inf}", 0, 0),
        ("5", "no idea", 0, 0),
        ("5", "\\boxed{" + "(" * 400 + "5", 1, 0),
        ("5", "\\boxed{9^{9^{9}}}", 0, 0),  # given up after a while
    ],
)
def test_math(right: str, completion: str, strict: int, relaxed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l2d_jax.evaluation.tasks.math.SECONDS", 1)
    score = grade("math", completion, solution=f"So $\\boxed{{{right}}}$.")
    assert (score.strict, score.relaxed) == (strict, relaxed)


# --- code ---


def run(programs: Sequence[Submission]) -> list[Verdict]:
    """Trusted programs, here and now."""
    verdicts = []
    for program in programs:
        candidate: dict[str, Any] = {}
        tests: dict[str, Any] = {}
        try:
            exec(program.candidate, candidate)
            exec(program.setup, tests)
            exec(program.tests, tests | {name: candidate[name] for name in program.names})
            verdicts.append(Verdict(passed=True, reason=""))
        except Exception as error:
            verdicts.append(Verdict(passed=False, reason=type(error).__name__))
    return verdicts


BODY = "    return x + 1\n"
WHOLE = "def inc(x):\n    return x + 1"


@pytest.mark.parametrize(
    ("name", "completion", "strict", "relaxed", "reason"),
    [
        ("humaneval", BODY, 1, 1, ""),
        ("humaneval", BODY + "\nThis adds one.", 0, 1, "SyntaxError"),
        ("humaneval", "    return x\n", 0, 0, "AssertionError"),
        ("humaneval", f"Sure:\n```python\n{WHOLE}\n```\nIt adds one.", 0, 1, "SyntaxError"),
        ("humaneval", f"\n{WHOLE}", 1, 1, ""),
        ("humaneval", f"```\n{WHOLE} if re else 0\n```", 0, 1, "SyntaxError"),  # the prompt imports re
        ("humaneval", "    return helper(x)\n\ndef helper(x):\n    return x + 1\n", 1, 1, ""),
        ("instructhumaneval", f"\n{BODY}", 1, 1, ""),
        ("mbpp", WHOLE, 1, 1, ""),
        ("mbpp", f"```\n{WHOLE}\n```", 0, 1, "SyntaxError"),
        ("mbpp", "def other(x): return x + 1", 0, 0, "KeyError"),
    ],
)
def test_programs(name: str, completion: str, strict: int, relaxed: int, reason: str) -> None:
    [score] = find_task(name).grade([problem(name)], [completion], run=run)
    assert (score.strict, score.relaxed, score.reason) == (strict, relaxed, reason)


@pytest.mark.parametrize(
    ("name", "completion", "paper", "thoughts"),
    [
        ("mbpp", f"I add 1.\n```\ndef inc(x): return x\n```\nNo:\n```python\n{WHOLE}\n```", (0, 0), (1, 1)),
        ("mbpp", f"```\n{WHOLE}\n```\nOr:\n```\ndef inc(x): return x\n```", (0, 1), (0, 0)),
        ("mbpp", WHOLE, (1, 1), (1, 1)),  # no block
        ("humaneval", f"Think: x + 1.\n```python\n{WHOLE}\n```\nDone.", (0, 1), (1, 1)),
        ("instructhumaneval", f"Think.\n```python\nimport re\n\n{WHOLE}\n```", (0, 1), (1, 1)),
        ("instructhumaneval", f"Think.\n```python\n{BODY}```", (0, 1), (1, 1)),
    ],
)
def test_a_program_after_thoughts_is_the_last_block(
    name: str, completion: str, paper: tuple[int, int], thoughts: tuple[int, int]
) -> None:
    for prompts, wanted in (("paper", paper), ("thoughts", thoughts), ("reasoning", thoughts)):
        [score] = find_task(name).grade([problem(name)], [completion], run=run, prompts=prompts)
        assert (score.strict, score.relaxed) == wanted


def test_a_candidate_comes_with_its_tests_and_once() -> None:
    seen: list[Submission] = []

    def watch(programs: Sequence[Submission]) -> list[Verdict]:
        seen.extend(programs)
        return run(programs)

    find_task("humaneval").grade([problem("humaneval")] * 2, [BODY, BODY + "ok"], run=watch)
    prompt = ROWS["humaneval"]["prompt"]
    assert [program.candidate for program in seen] == [prompt + BODY, prompt + BODY + "ok", prompt + BODY.rstrip("\n")]
    assert seen[0] == Submission(prompt + BODY, ROWS["humaneval"]["test"] + "\ncheck(inc)", ("inc",), prompt)
    find_task("mbpp").grade([problem("mbpp")], [WHOLE], run=watch)
    assert seen[-1] == Submission(WHOLE, "assert inc(1) == 2\nassert inc(2) == 3", ("inc",), "import sys")


def test_code_is_not_run_unasked() -> None:
    with pytest.raises(InputError, match=r"mbpp runs generated code: allow it with --allow_code_execution"):
        find_task("mbpp").grade([problem("mbpp")], [WHOLE])


# --- all tasks ---


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(("completion", "reason"), [("", "empty"), (" \n", "empty"), ("2 \ud800", "broken unicode")])
def test_what_cannot_be_judged_scores_nothing(name: str, completion: str, reason: str) -> None:
    scores = find_task(name).grade([problem(name)] * 2, [completion] * 2, run=run)
    assert scores == [Score(0, 0, None, None, reason)] * 2


@pytest.mark.parametrize("name", READ)
def test_odd_completions_are_wrong_and_do_no_harm(name: str) -> None:
    odd = [
        "\x00",
        "```",
        "\\boxed{",
        "\\sqrt",
        "####",
        "#### -",
        "(" * 2000,
        "答案",
        "\u2028",
        "<answer>",
        "\\frac{" * 50,
    ]
    scores = find_task(name).grade([problem(name)] * len(odd), odd, run=run)
    assert [score for score in scores if score.strict or score.relaxed] == []


def test_scores_come_in_the_order_of_completions() -> None:
    scores = find_task("gsm8k").grade([problem("gsm8k")] * 4, ["#### 2", "", "#### 3", "#### 2"])
    assert [score.strict for score in scores] == [1, 0, 0, 1]
    with pytest.raises(AssertionError):
        find_task("gsm8k").grade([problem("gsm8k")], ["#### 2", "#### 2"])


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<think>3?</think><answer>#### 2</answer>", "#### 2"),
        ("3?</think>\n#### 2", "#### 2"),
        ("<think><answer>3</answer></think><answer>4</answer> <answer>2</answer>", "2"),
        ("<answer>2", "2"),
        ("<think>2", ""),
        ("2", "2"),
    ],
)
def test_tags(completion: str, expected: str) -> None:
    assert answer_part(completion) == expected


def test_tagged_completions_are_judged_by_their_answer() -> None:
    [score] = find_task("gsm8k").grade([problem("gsm8k")], ["<think>#### 3</think>#### 2"], tagged=True)
    assert score[:2] == (1, 1)
    [score] = find_task("gsm8k").grade([problem("gsm8k")], ["<think>#### 2"], tagged=True)
    assert (score.strict, score.reason) == (0, "empty")
