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
        "class UnicodeDecodeError(Exception): pass\ndef answer(x): raise UnicodeDecodeError(x)",
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
        "import os\ndef answer(x):\n    with open(os.__file__) as file, open(os.devnull, 'w') as none:\n"
        "        return none.write(file.read(x))",
        "assert answer(3) == 3",
    ),
    "asyncio": (
        "import asyncio\nasync def later(x): return x\ndef answer(x): return asyncio.run(later(x))",
        "assert answer(1) == 1",
    ),
    "threads": (
        "import asyncio, concurrent.futures, time\ndef answer(x):\n"
        "    with concurrent.futures.ThreadPoolExecutor(4) as pool: times = list(pool.map(time.sleep, [0.01] * 8))\n"
        "    return len(times) + asyncio.run(asyncio.to_thread(len, 'ab'))",
        "assert answer(1) == 10",
    ),
    "alarms": (
        "import signal\ndef stop(*_): raise TimeoutError\ndef answer(x):\n    signal.signal(signal.SIGALRM, stop)\n"
        "    try:\n        signal.setitimer(signal.ITIMER_REAL, 0.01)\n        while True: pass\n"
        "    except TimeoutError: return signal.alarm(0)",
        "assert answer(1) == 0",
    ),
    "many modules": (
        "import bz2, csv, ctypes, datetime, decimal, hashlib, locale, logging, lzma, multiprocessing, os, pathlib\n"
        "import platform, random, secrets, select, shutil, socket, sqlite3, statistics, subprocess, tempfile, uuid\n"
        "import unittest, zlib, zoneinfo\ndef answer(x):\n    os.times(); os.cpu_count(); os.getcwd()\n"
        "    locale.setlocale(locale.LC_ALL, ''); platform.platform(); uuid.uuid4(); secrets.token_hex()\n"
        "    return sqlite3.connect(':memory:').execute('select 1').fetchone()[0] + len(os.listdir('/'))",
        "assert answer(1) > 1",
    ),
}

# As their tests write them: surrogates that belong together and do not, NUL, and what is long.
STRINGS = r"""
STRINGS = ['\ud83d\ude00', '\U0001f600', '\ude00\ud83d', 'a\ud83d', '\0', '', '\x7f\u2028\ufeff']
STRINGS.append(STRINGS[0] * 99_999)
def same(one, other): assert [ascii(item) for item in one] == [ascii(item) for item in other]
"""


@isolated
def test_ordinary_code_passes():
    verdicts = grade([ask(candidate, tests) for candidate, tests in ORDINARY.values()])
    assert dict(zip(ORDINARY, (verdict.reason for verdict in verdicts), strict=True)) == dict.fromkeys(
        ORDINARY, "passed"
    )


CROSSINGS = {
    "values": ("def answer(x): return x", "same(answer(STRINGS), STRINGS)"),
    "keys": ("def answer(x): return {one: 1 for one in x}", "same(answer(STRINGS), STRINGS)"),
    "keyword names": (
        "def answer(**x): return list(x)",
        "same(answer(**dict.fromkeys(STRINGS, 1)), STRINGS)",
    ),
    "their lengths": (
        "def answer(x): return [len(one) for one in x]",
        "assert answer(STRINGS) == [*map(len, STRINGS)]",
    ),
    "texts of exceptions": (
        "def answer(x): raise ValueError(x)",
        "for one in STRINGS:\n    try: answer(one)\n    except ValueError as error: same([str(error)], [one])\n"
        "    else: assert False",
    ),
    "arguments of exceptions": (
        "def answer(x):\n    if x == 1: raise KeyError('a')\n    raise OSError(2, 'b')",
        "try: answer(1)\nexcept KeyError as error: assert str(error) == repr('a')\n"
        "try: answer(2)\nexcept FileNotFoundError as error: assert error.errno == 2\nelse: assert False",
    ),
}


@isolated
def test_strings_cross_as_they_are():
    verdicts = grade([ask(candidate, tests, setup=STRINGS) for candidate, tests in CROSSINGS.values()])
    assert dict(zip(CROSSINGS, (verdict.reason for verdict in verdicts), strict=True)) == dict.fromkeys(
        CROSSINGS, "passed"
    )


@isolated
def test_surrogates_in_a_source_are_not_joined():
    [verdict] = grade([ask("def answer(x): return '\ud83d\ude00' and 42")])
    assert verdict.reason.startswith("syntax error")


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
    assert all(verdict.reason.startswith("not plain data") for verdict in verdicts)


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
