"""Errors in the format of OpenAI's API."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from l2d_jax.errors import LONGEST_LINE, InputError, shorten
from l2d_jax.serving.work import EndingError, FullError, StartingError

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def describe(status: int, message: str) -> dict[str, Any]:
    """OpenAI's error object, with the status as its code."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    line = shorten(" ".join(message.split()), LONGEST_LINE)
    return {"error": {"message": line, "type": kind, "param": None, "code": status}}


def explain(error: Exception) -> dict[str, Any]:
    """The error that ended a request, as OpenAI's error object."""
    status, message = 500, f"{type(error).__name__}: {error}"
    match error:
        case HTTPException():
            status, message = error.status_code, error.detail
        case EndingError() | StartingError():
            status, message = 503, str(error)
        case FullError():
            status, message = 429, str(error)
        case InputError():
            status, message = 400, str(error)
        case ClientDisconnect():
            status = 499  # as in nginx: the client closed the connection
        case TimeoutError():
            problem = "the answer took longer than this server allows"
            status, message = 504, f"{problem}: lower max_tokens or the budget, or ask later"
    return describe(status, message)


def respond(error: Exception) -> JSONResponse:
    """The response to a failed request."""
    told, headers = explain(error), dict[str, str]()
    if isinstance(error, FullError):
        headers = {"Retry-After": str(error.seconds)}
    elif isinstance(error, HTTPException):
        headers = dict(error.headers or {})
    return JSONResponse(told, status_code=told["error"]["code"], headers=headers)
