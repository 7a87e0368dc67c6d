"""The server's routes: OpenAI's API, figures for Prometheus, and the page at `/`."""

import asyncio
import contextlib
import hmac
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from l2d_jax.decoding.requests import Piece
from l2d_jax.errors import InputError
from l2d_jax.serving.engine import Engine, FullError, Work
from l2d_jax.serving.protocol import Asked, Protocol
from l2d_jax.serving.replies import Reply, event

PAGE = Path(__file__).with_name("page.html")


class ServerApp:
    """The routes over one engine."""

    def __init__(
        self,
        engine: Engine,
        protocol: Protocol,
        *,
        about: dict[str, Any],
        seconds: float,
        longest_body: int,
        key: str | None = None,
    ) -> None:
        """`about` is what `/v1/models` says of the model; with a `key`, requests must bring it.

        A request may take so many `seconds` from its arrival to its end, and its body so many bytes.
        """
        self._engine, self._protocol, self._about = engine, protocol, about
        self._limit, self._longest_body, self._key = seconds, longest_body, key
        self._reading = asyncio.Lock()  # a tokenizer encodes one text at a time
        self._figures = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self._figures)
        self._requests = counter("l2d_requests", "Requests for answers, by HTTP status.", ["status"])
        self._tokens = counter("l2d_tokens", "Tokens of prompts and of answers.", ["kind"])
        self._evaluations = counter("l2d_evaluations", "Evaluations of the diffusion path.")
        about_seconds = "From a request to the end of its answers."
        self._seconds = prometheus.Histogram("l2d_request_seconds", about_seconds, registry=self._figures)
        for name, place in (("decoding", 0), ("waiting", 1)):
            gauge = prometheus.Gauge(f"l2d_answers_{name}", f"Answers that are {name}.", registry=self._figures)
            gauge.set_function(partial(lambda place: self._engine.load[place], place))

    def routes(self) -> Starlette:
        """The application, for any ASGI server."""
        routes = [
            Route("/", lambda _: FileResponse(PAGE)),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/metrics", lambda _: PlainTextResponse(prometheus.generate_latest(self._figures))),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._models),
            Route("/v1/chat/completions", partial(self._answer, is_chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, is_chat=False), methods=["POST"]),
        ]
        handlers = dict.fromkeys((HTTPException, Exception), lambda _, error: _failure(error))
        return Starlette(routes=routes, exception_handlers=handlers)

    def _check_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            raise HTTPException(401, "this server wants its API key: send it as 'Authorization: Bearer KEY'")

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [self._about]})
        if name != self._protocol.name:
            raise HTTPException(404, f"there is no model {name!r} here: it is {self._protocol.name!r}")
        return JSONResponse(self._about)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        self._check_key(request)
        try:
            response = await self._answered(request, is_chat=is_chat)
        except Exception as error:
            response = _failure(error)
        self._requests.labels(response.status_code).inc()
        return response

    async def _answered(self, request: Request, *, is_chat: bool) -> Response:
        body = await self._body(request)
        async with self._reading:
            asked = await run_in_threadpool(self._protocol.read, body, is_chat=is_chat)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(told: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(queue.put_nowait, told)

        works = [Work(answer, tell, is_traced=asked.body.trace) for answer in asked.answers]
        self._engine.submit(works)
        reply = Reply(asked, self._protocol.tokenizer, name=self._protocol.name)
        chunks = self._follow(asked, reply, queue, works)
        if asked.body.stream:
            return StreamingResponse(self._stream(chunks), media_type="text/event-stream")

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(ClientDisconnect())

        watching = asyncio.ensure_future(watch())
        try:
            async for _ in chunks:
                pass
        finally:
            watching.cancel()
        return JSONResponse(reply.whole())

    async def _follow(
        self, asked: Asked, reply: Reply, queue: "asyncio.Queue[Any]", works: list[Work]
    ) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a reply as its answers come; whoever stops listening, or waits too long, cancels them."""
        with self._seconds.time():
            try:
                async with asyncio.timeout(self._limit):
                    while not reply.is_done:
                        told = await queue.get()
                        if isinstance(told, Exception):
                            raise told
                        if not isinstance(told, Piece):
                            reply.trace = told
                        elif told.ending == "broken":
                            raise InputError("its logits were not numbers, or its format grew too large: ask for less")
                        else:
                            yield reply.add(told)
                if asked.body.stream_options.include_usage:
                    yield reply.last_chunk()
            finally:
                self._engine.cancel(works)
                usage = reply.usage()
                self._tokens.labels("prompt").inc(asked.prompt_tokens)
                self._tokens.labels("answer").inc(usage["completion_tokens"])
                self._evaluations.inc(usage["evaluations"])

    async def _stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                yield event(_explained(error))
                return
        yield event("[DONE]")

    async def _body(self, request: Request) -> Any:
        """The body as JSON; raises `InputError`, and `HTTPException` for one that is too large."""
        data = b""
        async for part in request.stream():
            data += part
            if len(data) > self._longest_body:
                raise HTTPException(413, f"a body has at most {self._longest_body} bytes: shorten it")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the body must be JSON ({error}): mend it") from None


def _explained(error: Exception) -> dict[str, Any]:
    """What ended a request, as OpenAI's object of an error; its code is the status."""
    status, message = 500, f"{type(error).__name__}: {error}"[:300]
    match error:
        case HTTPException():
            status, message = error.status_code, error.detail
        case FullError():
            status, message = 429, str(error)
        case InputError():
            status, message = 400, str(error)
        case ClientDisconnect():
            status = 499  # as nginx has it
        case TimeoutError():
            problem = "the answer took longer than this server allows"
            status, message = 504, f"{problem}: lower max_tokens or the budget, or ask later"
    kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _failure(error: Exception) -> JSONResponse:
    told = _explained(error)
    headers = {"Retry-After": str(error.seconds)} if isinstance(error, FullError) else None
    return JSONResponse(told, status_code=told["error"]["code"], headers=headers)
