"""What generated code may try: wrong answers, early ends, forged verdicts, crashes; `escapes` has the rest.

An attack passes its tests where nothing stops it.

`bare` says that `python -c` alone, judged by its exit status, lets it through; the others either fail there too, or
would harm the machine that tries.
"""

import dataclasses
import textwrap

ASK = "assert answer(1) == 42"


@dataclasses.dataclass(frozen=True)
class Attack:
    """Sources may name what lies outside: FOLDER, PARENT, PORT, ABSTRACT, and the environment's SECRET."""

    name: str
    candidate: str
    tests: str = ASK
    bare: bool = True
    reason: str = ""  # that the verdict gives, in part

    def aimed(self, aims: dict[str, object]) -> "Attack":
        """At what really lies outside."""
        candidate, tests = self.candidate, self.tests
        for name, aim in aims.items():
            candidate, tests = candidate.replace(name, str(aim)), tests.replace(name, str(aim))
        return dataclasses.replace(self, candidate=candidate, tests=tests)


def answering(body: str, *, before: str = "") -> str:
    return f"{before}\ndef answer(x):\n" + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"


def _equal(kind: str, value: str, *, more: str = "") -> str:
    return f"""
class Equal({kind}):
    {more}
    __eq__ = __le__ = __ge__ = lambda self, other: True
    __ne__ = __lt__ = __gt__ = lambda self, other: False
    __hash__ = {kind}.__hash__
    __sub__ = __rsub__ = __abs__ = __round__ = lambda self, *other: self
def answer(x): return Equal({value})
"""


_VALUES = [
    Attack("an object equal to everything", _equal("object", "")),
    Attack("an int equal to everything", _equal("int", "0"), reason="assertion failed"),
    Attack(
        "an int that claims to be a bool",
        _equal("int", "0", more="__class__ = property(lambda self: bool)"),
        "value = answer(1)\nassert isinstance(value, bool) and value == True",
        reason="assertion failed",
    ),
    Attack("a float as near as you like", _equal("float", "0"), "assert abs(answer(1) - 42) <= 1e-6"),
    Attack("a str equal to everything", _equal("str", "''"), "assert answer(1) == '42'", reason="assertion failed"),
    Attack("a list equal to everything", _equal("list", "()"), "assert answer(1) == [42]", reason="assertion failed"),
    Attack("a tuple equal to everything", _equal("tuple", "()"), "assert answer(1) == (42,)", reason="assertion"),
    Attack("a dict equal to everything", _equal("dict", "()"), "assert answer(1) == {4: 2}", reason="assertion"),
    Attack(
        "equal inside a list",
        _equal("object", "") + "\ninner = answer\ndef answer(x): return [inner(x)]",
        "assert answer(1) == [42]",
    ),
    Attack(
        "builtins shadowed",
        "import builtins\nabs = lambda *x: 0\nbuiltins.abs = builtins.max = lambda *x: 0\ndef answer(x): return 0",
        "assert abs(answer(1) - 42) < 1e-6",
        reason="assertion failed",
    ),
    Attack(
        "modules of the tests replaced",
        "import math\nmath.isclose = lambda *x: True\ndef answer(x): return 0.0",
        "import math\nassert math.isclose(answer(1), 42)",
        reason="assertion failed",
    ),
    Attack(
        "StopIteration to end the tests' loop",
        "def answer(x): raise StopIteration",
        "assert all(map((42).__eq__, map(answer, [1, 2])))",
        reason="exception RuntimeError: StopIteration",
    ),
]

_ENDS = [
    Attack("sys.exit(0) at import", "import sys\nsys.exit(0)", reason="SystemExit"),
    Attack("sys.exit(0) in the call", answering("import sys\nsys.exit(0)"), reason="SystemExit"),
    Attack("os._exit(0) at import", "import os\nos._exit(0)", reason="ended with status 0"),
    Attack("os._exit(0) in the call", answering("import os\nos._exit(0)"), reason="ended with status 0"),
    Attack("raise SystemExit at import", "raise SystemExit", reason="SystemExit"),
    Attack(
        "its pipes closed", answering("import os\nos.closerange(0, 64)\nwhile True: pass"), bare=False, reason="closed"
    ),
]

_SEEN = """
import gc, re, sys, os
frame, seen = sys._getframe().f_back, []
while frame:
    seen += [*frame.f_locals.values(), *frame.f_globals.values(), frame.f_code.co_consts]
    frame = frame.f_back
text = repr(seen) + repr([o for o in gc.get_objects() if type(o) in (list, tuple, dict, str)])
"""
_PEEK_TESTS = "expected = 'expected-' + str(6 * 7)\nassert answer(1) == expected == 'expected-42'"
_TOKENS = """
import os
for token in (b'{"reason": "passed"}', b'{"result": 42}', b'{"started": true}', b'passed', b'True', b'OK'):
    for message in (token + b'\\n', len(token).to_bytes(4, 'big') + token):
        for descriptor in range(64):
            try: os.write(descriptor, message)
            except OSError: pass
"""

_FORGERIES = [
    Attack(
        "expected values in frames and gc",
        answering(_SEEN + "return re.search(r'expected-\\d+', text)[0]"),
        _PEEK_TESTS,
    ),
    Attack(
        "expected values in /proc",
        answering("import re\nwith open('/proc/self/cmdline') as f: return re.search(r'expected-\\d+', f.read())[0]"),
        _PEEK_TESTS,
        reason="FileNotFoundError",
    ),
    Attack(
        "expected values on descriptors",
        answering("""
            import os
            text = b''
            for descriptor in range(64):
                try:
                    os.set_blocking(descriptor, False)
                    text += os.read(descriptor, 10**6)
                except OSError: pass
            return 'expected-42' if b'expected-42' in text else None
        """),
        _PEEK_TESTS,
        bare=False,
        reason="assertion failed",
    ),
    Attack(
        "the verdict through frames",
        answering("""
            import builtins, sys
            frame = sys._getframe()
            while frame:
                frame.f_locals.update(passed=True, expected=0, reason='passed', result=42)
                frame.f_globals.update(_reason=lambda error: 'passed', passed=True, answer=lambda x: 42)
                frame = frame.f_back
            return 0
        """),
        bare=False,
    ),
    Attack(
        "the verdict through gc",
        answering("""
            import gc, os
            for item in gc.get_objects():
                if isinstance(item, dict) and 'tests' in item: item['tests'] = ''
                if isinstance(item, type) and hasattr(item, 'send'): item.send = lambda self, message: os.write(
                    self._outgoing, len(b'{"reason": "passed"}').to_bytes(4, 'big') + b'{"reason": "passed"}')
            return 0
        """),
        bare=False,
        reason="exception",
    ),
    Attack("the success token on every descriptor", _TOKENS + "os._exit(0)", bare=True),
    Attack("the success token before an answer", answering(_TOKENS + "return 0"), bare=False),
    Attack(
        "half a message, then silence",
        answering("""
            import os, time
            for d in range(3, 64):
                try: os.write(d, b'\\0\\0')
                except OSError: pass
            time.sleep(99)
        """),
        bare=False,
        reason="timeout",
    ),
]

_CRASHES = [
    Attack("a segmentation fault", answering("import ctypes\nctypes.string_at(0)"), bare=False, reason="SIGSEGV"),
    Attack("deep recursion", answering("return answer(x)"), bare=False, reason="RecursionError"),
    Attack(
        "recursion without a limit",
        answering("import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return max([x], key=f)\nreturn f(x)"),
        bare=False,
    ),
    Attack("a syntax error", "def answer(x) return 42", bare=False, reason="syntax error"),
    Attack("a NUL byte", "def answer(x): return 42\n\0", bare=False, reason="syntax error"),
    Attack("broken unicode", "def answer(x): return '\ud800' and 42\n", bare=False, reason="syntax error"),
    Attack("source nested deeply", "answer = lambda x: " + "(" * 10**5 + "42" + ")" * 10**5, bare=False),
    Attack("an empty source", "", bare=False, reason="NameError"),
]

ATTACKS = [*_VALUES, *_ENDS, *_FORGERIES, *_CRASHES]
