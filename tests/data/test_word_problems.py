import json
import re
from fractions import Fraction

import pytest

from l2d_jax.data.word_problems import SPLITS, STORIES, WORKINGS, conversations, problem
from l2d_jax.errors import InputError

EQUATION = re.compile(r"(\d+(?: [-+*/] \d+)+) = (\d+)")
# What a solution may use though neither the question nor an earlier step says it.
CONSTANTS = {"fence": {2}, "days": {2}, "sale": {100}}


def value(expression: str) -> Fraction:
    """The value by the usual precedence, slowly and obviously."""
    words = expression.split()
    terms = [Fraction(words[0])]
    for operator, word in zip(words[1::2], words[2::2], strict=True):
        number = Fraction(word)
        if operator in "+-":
            terms.append(number if operator == "+" else -number)
        else:
            terms[-1] = terms[-1] * number if operator == "*" else terms[-1] / number
    return sum(terms, Fraction(0))


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", text)}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_arithmetic_is_right(split, seed):
    for index in range(1000):
        made = problem(index, seed=seed, split=split)
        *steps, last = made.solution.split("\n")
        assert last == f"#### {made.answer}"
        assert isinstance(made.answer, int)
        assert made.answer >= 0
        equations = EQUATION.findall("\n".join(steps))
        assert 2 <= len(equations) <= 3
        story = STORIES[index % len(STORIES)]
        known = numbers(made.question) | CONSTANTS.get(story, set())
        if story == "leftover":
            total, size = map(int, re.findall(r"\d+", made.question))
            known.add(total // size)
        for left, right in equations:
            assert value(left) == int(right), made
            assert numbers(left) <= known, made
            known.add(int(right))
        assert int(equations[-1][1]) == made.answer


def test_answers_to_hand_checked_questions():
    """One of each story, read and worked out by hand."""
    expected = [70, 144, 408, 15, 38, 127, 240, 3, 33, 10, 139, 52, 0, 215]
    assert [problem(index, seed=5).answer for index in range(len(STORIES))] == expected


def test_a_problem_is_a_function_of_its_arguments():
    forwards = [problem(index, seed=3) for index in range(50)]
    assert [problem(index, seed=3) for index in reversed(range(50))] == forwards[::-1]
    assert len({made.question for made in forwards}) == 50
    assert problem(7, seed=4) != forwards[7]
    assert problem(7, seed=3, split="test") != forwards[7]


def test_splits_share_no_numbers():
    """Not the same question with another name, either."""
    seen = {}
    for split in SPLITS:
        for seed in (0, 1):
            for index in range(20 * len(STORIES)):
                question = problem(index, seed=seed, split=split).question
                key = index % len(STORIES), *re.findall(r"\d+", question)
                assert seen.setdefault(key, split) == split, question


def test_few_repeats():
    rows = conversations(2000)
    assert len({json.dumps(row) for row in rows}) > 1980


def test_rows_are_conversations():
    rows = conversations(20, seed=2, split="validation")
    for index, row in enumerate(rows):
        made = problem(index, seed=2, split="validation")
        assert row == {
            "messages": [
                {"role": "user", "content": made.question},
                {"role": "assistant", "content": made.solution},
            ]
        }
    assert rows[:5] == conversations(5, seed=2, split="validation")


def test_texts_are_clean_and_short():
    for index in range(50 * len(STORIES)):
        made = problem(index)
        assert not re.search(r"  | 1 [a-z]+s\b|[{}]| \.", made.question + made.solution), made
        assert made.question.endswith("?")
        assert made.question.isascii()
        assert len(made.question) < 170
        assert len(made.solution) < 130


def test_every_story_takes_part():
    questions = [problem(index).question for index in range(len(STORIES))]
    shapes = {re.sub(r"\d+", "0", question).split(" ", 1)[1][:25] for question in questions}
    assert len(STORIES) >= 12
    assert len(shapes) == len(STORIES)


def test_unknown_split():
    with pytest.raises(InputError, match="splits train, validation, test, not 'dev'"):
        problem(0, split="dev")


@pytest.mark.parametrize("working", WORKINGS)
def test_less_working_leaves_the_question_and_the_answer(working):
    """The equations are all there, in their order, and nothing else is; the answers stand alone."""
    whole, less = conversations(28), conversations(28, working=working)
    for row, short in zip(whole, less, strict=True):
        assert row["messages"][0] == short["messages"][0]
        solution, shown = (one["messages"][1]["content"] for one in (row, short))
        *steps, last = shown.splitlines()
        assert last == solution.splitlines()[-1]
        if working == "answers":
            assert steps == []
        if working == "equations":
            assert len(steps) == solution.count(" = ") >= 1
            assert all(step in solution and eval(step.replace("=", "==")) for step in steps)


def test_another_working_is_refused():
    with pytest.raises(InputError, match="have the subsets sentences, equations, answers and chains, not 'hints'"):
        conversations(1, working="hints")
