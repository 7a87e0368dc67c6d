"""One of two isolated processes: runs a candidate's source, then its functions as the grader calls them.

Nothing in this process is trusted. A candidate may take over the whole process, but then it can only send other plain
data, which it could have returned anyway.
"""

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from l2d_jax.evaluation.sandbox.isolated import plain_data
from l2d_jax.evaluation.sandbox.isolated.restraint import restrain


def main() -> None:
    """Serve calls until the grader ends. The task comes from standard input, descriptors from the command line."""
    incoming, outgoing = map(int, sys.argv[1:])
    task = plain_data.load_message(sys.stdin.buffer.read())
    restrain(task)
    channel = plain_data.Channel(incoming, outgoing, limit=task["limits"]["output_bytes"])
    channel.send({"started": True})
    module = type(sys)("candidate")  # not "__main__", so that a solution's demo code does not run
    sys.modules["candidate"] = module  # dataclasses look up the types of fields there

    def load() -> None:
        try:
            code = compile(task["source"], "candidate", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # ValueError: NUL bytes, broken unicode
            raise SyntaxError(str(error)) from None
        exec(code, module.__dict__)

    def call(request: dict[str, Any]) -> Any:
        name, arguments, keywords = plain_data.decode_plain(request["call"])
        if name not in module.__dict__:
            raise NameError(f"name '{name}' is not defined")
        return module.__dict__[name](*arguments, **keywords)

    def reply(work: Callable[[], Any]) -> None:
        answer: dict[str, Any]
        try:
            answer = {"result": plain_data.encode_plain(work())}
        except plain_data.NotPlainError as error:
            answer = {"not plain data": str(error)}
        except BaseException as error:  # also SystemExit, which ends the candidate but not this process
            answer = {"error": [type(error).__name__, *_text(error)]}
        try:
            channel.send(answer)
        except plain_data.TooLargeError as error:
            channel.send({"too large": str(error)})

    with contextlib.suppress(plain_data.ClosedError):
        reply(load)
        while True:
            reply(partial(call, channel.receive()))


def _text(error: BaseException) -> tuple[str, Any]:
    """An exception's text, and its arguments if they are plain data."""
    text, arguments = "", None
    with contextlib.suppress(BaseException):
        text = str(error)
        arguments = plain_data.encode_plain(error.args)
    return text, arguments
