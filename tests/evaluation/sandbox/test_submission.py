from l2d_jax.evaluation.sandbox.grade import grade
from l2d_jax.evaluation.sandbox.isolation import Limits
from l2d_jax.evaluation.sandbox.submission import Verdict
from tests.support.submissions import ask, isolated

ORDINARY = {
    "a Counter": (
        "import collections\ndef answer(x): return collections.Counter(x)",
        "assert answer('aab') == {'a': 2, 'b': 1}",
    ),
    "what JSON lacks": (
        "def answer(*, x): return x",
        "value = [(1, {2.5: b'3'}), {4}, None, 2**99, 1j, int]\nassert answer(x=value) == value",
    ),
    "an exception that is expected": (
        "def answer(x): return [][x]",
        "try: answer(0)\nexcept IndexError: pass\nelse: assert False",
    ),
    "an exception that wants more than a text": (
        "def answer(x): raise UnicodeDecodeError('utf-8', b'', 0, 1, x)",
        "try: answer('')\nexcept RuntimeError: pass\nelse: assert False",
    ),
    "much output": ("print('loud' * 9999)\ndef answer(x): print(x); return x", "assert answer(1) == 1"),
    "a main block": ("if __name__ == '__main__': raise SystemExit\ndef answer(x): return x", "assert answer(1) == 1"),
    "dataclasses": (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass Pair:\n    x: int\n"
        "def answer(x): return Pair(x).x",
        "assert answer(1) == 1",
    ),
    "a file": (
        "def answer(x):\n    with open('file', 'w+') as file: return file.write(x)",
        "assert answer('abc') == 3",
    ),
    "asyncio": (
        "import asyncio\nasync def later(x): return x\ndef answer(x): return asyncio.run(later(x))",
        "assert answer(1) == 1",
    ),
}


@isolated
def test_ordinary_code_passes():
    verdicts = grade([ask(candidate, tests) for candidate, tests in ORDINARY.values()])
    assert dict(zip(ORDINARY, (verdict.reason for verdict in verdicts), strict=True)) == dict.fromkeys(
        ORDINARY, "passed"
    )


@isolated
def test_what_is_not_plain_data_is_told_apart():
    calls = {
        "not plain data: function": ("def answer(x): return answer", "answer(1)"),
        "not plain data: generator": ("def answer(x): return (y for y in x)", "list(answer([1]))"),
        "not plain data: function as an argument": ("def answer(x): return x()", "answer(lambda: 1)"),
    }
    # ... also where the tests would go on.
    verdicts = grade([ask(candidate, f"try: {call}\nexcept BaseException: pass") for candidate, call in calls.values()])
    assert verdicts == [Verdict(passed=False, reason=reason) for reason in calls]
    assert all(verdict.not_plain for verdict in verdicts)


@isolated
def test_a_reason_is_one_printable_line():
    verdict = grade([ask("def answer(x): raise ValueError('a\\n\\x1b[31mb' + 'c' * 9999)")])[0]
    assert verdict.reason.startswith("exception ValueError: a  [31mbccc")
    assert verdict.reason.isprintable()
    assert len(verdict.reason) == 200


@isolated
def test_the_setup_of_the_tests_is_not_the_candidates():
    setup, tests = "def double(x): return 2 * x\ndef answer(x): return 0", "assert answer(3) == double(3)"
    candidates = "def double(x): return 0\ndef answer(x): return 0", "def answer(x): return x + x"
    verdicts = grade([ask(candidate, tests, setup=setup) for candidate in candidates])
    assert [verdict.passed for verdict in verdicts] == [False, True]


@isolated
def test_processor_time_is_limited():
    [verdict] = grade([ask("while True: pass")], limits=Limits(seconds=60.0, cpu_seconds=1))
    assert verdict.reason == "CPU time"


@isolated
def test_tests_that_end_early_are_not_passed():
    [verdict] = grade([ask("", "import os\nos._exit(0)")])
    assert verdict == Verdict(passed=False, reason="the tests' process: ended with status 0")
