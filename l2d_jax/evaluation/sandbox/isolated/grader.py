"""The other isolated process: runs the tests against a candidate, whose functions it can only call, and reports.

The candidate's process does not have the pipe of the report. Whatever goes wrong here counts as not passed.
"""

import builtins
import os
import sys
from typing import Any, NoReturn

from l2d_jax.evaluation.sandbox.isolated import plain_data
from l2d_jax.evaluation.sandbox.isolated.restraint import restrain

# If raised inside map() or next(), these would silently end a loop of the tests.
_RESERVED = (StopIteration, StopAsyncIteration)


def main() -> None:
    """Run the tests once. The task comes from standard input, the descriptors from the command line."""
    incoming, outgoing, verdict = map(int, sys.argv[1:])
    task = plain_data.load_message(sys.stdin.buffer.read())
    restrain(task)
    channel = plain_data.Channel(incoming, outgoing, limit=task["limits"]["output_bytes"])
    report = plain_data.Channel(-1, verdict, limit=2**16)
    try:
        channel.receive()  # sent by the candidate's process before it has read the candidate
    except plain_data.ClosedError:
        os._exit(1)
    report.send({"started": True})
    _Grader(channel, report).grade(task["setup"], task["tests"], task["names"])


class _Grader:
    def __init__(self, channel: plain_data.Channel, report: plain_data.Channel):
        self._channel, self._report = channel, report

    def grade(self, setup: str, tests: str, names: list[str]) -> NoReturn:
        try:
            self._result()  # the result of running the candidate's source
            space: dict[str, Any] = {"__name__": "tests"}
            exec(compile(setup, "setup", "exec", dont_inherit=True), space)
            space.update((name, self._proxy(name)) for name in names)
            exec(compile(tests, "tests", "exec", dont_inherit=True), space)
        except BaseException as error:
            self._end(_reason(error))
        self._end("passed")

    def _proxy(self, name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            try:
                self._channel.send({"call": plain_data.encode_plain([name, arguments, keywords])})
            except plain_data.NotPlainError as error:
                self._end(f"not plain data: {error} as an argument")
            except plain_data.ClosedError:
                self._end("ended")
            except plain_data.TooLargeError as error:
                self._end(f"too large: {error} of arguments")
            return self._result()

        return call

    def _result(self) -> Any:
        """The candidate's reply. Without one, grading ends, whatever exceptions the tests catch."""
        try:
            [(kind, content)] = self._channel.receive().items()
            if kind == "result":
                return plain_data.decode_plain(content)
            name, text, arguments = content if kind == "error" else (kind, content, None)
            arguments = plain_data.decode_plain(arguments)
            if not isinstance(name, str) or not isinstance(text, str):
                raise plain_data.MalformedError("not text")
        except plain_data.ClosedError:
            self._end("ended")
        except plain_data.TooLargeError as error:
            self._end(f"too large: {error}")
        except (ValueError, TypeError):
            self._end("malformed: not an answer of the candidate's process")
        if kind in ("not plain data", "too large"):
            self._end(f"{kind}: {text}")
        raise _exception(name, text, arguments)

    def _end(self, reason: str) -> NoReturn:
        self._report.send({"reason": reason[:300]})
        os._exit(0)


def _exception(name: str, text: str, arguments: Any) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _RESERVED):
        for known in (arguments if type(arguments) is tuple else (text,), (text,)):
            try:
                error = kind(*known)
                if known == (text,) or str(error) == text:
                    return error
            except Exception:  # a class of the candidate may have a builtin name but take other arguments
                pass
    return RuntimeError(f"{name}: {text}")


def _reason(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, AssertionError):
        return f"assertion failed: {text}" if text else "assertion failed"
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, SyntaxError):
        return f"syntax error: {text}"
    return f"exception {type(error).__name__}: {text}"
