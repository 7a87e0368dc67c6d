"""The server's routes: OpenAI's API, figures for Prometheus, and the page at `/`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from l2d_jax.decoding.requests import Piece
from l2d_jax.errors import InputError
from l2d_jax.serving.access import Access, AccessGate
from l2d_jax.serving.api.bodies import parse_json
from l2d_jax.serving.api.paths import read_path
from l2d_jax.serving.api.protocol import Asked, Protocol
from l2d_jax.serving.api.replies import Reply, event
from l2d_jax.serving.api.response_events import ResponseReply
from l2d_jax.serving.api.responses import read_response
from l2d_jax.serving.engine import Engine
from l2d_jax.serving.failures import explain, respond
from l2d_jax.serving.figures import Figures
from l2d_jax.serving.models import ServedModel
from l2d_jax.serving.work import PieceWork, Work

PAGE = Path(__file__).with_name("page.html")
READERS = 4  # number of requests that are read at a time: checked, tokenised, formats compiled
SCORED = object()  # a queue entry: a prompt has been scored


class _Stream(StreamingResponse):
    """A stream of events that cancels its answers when it ends, for whatever reason."""

    def __init__(self, events: AsyncIterator[str], cancel: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


class ServerApp:
    """The routes over one engine."""

    def __init__(
        self,
        engine: Engine,
        protocol: Protocol,
        *,
        access: Access,
        seconds: float,
        longest_body: int,
        load_path: Callable[[str, str], ServedModel] | None = None,
    ) -> None:
        """Make the application.

        Args:
          engine: decodes the answers.
          protocol: reads the requests.
          access: who may use the server.
          seconds: largest time of a request, from its arrival to its end.
          longest_body: largest size of a body, in bytes.
          load_path: makes a model of a name and a folder, for the operator; None: paths stay as they are.
        """
        self._engine, self._protocol, self._access = engine, protocol, access
        self._models, self._load_path = protocol.models, load_path
        self._loading = anyio.CapacityLimiter(1)
        self._limit, self._longest_body = seconds, longest_body
        self._readers = anyio.CapacityLimiter(READERS)
        self._figures = Figures(engine)

    def routes(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/", lambda _: FileResponse(PAGE)),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._describe),
            Route("/v1/models/{name:path}", self._describe),
            Route("/v1/paths", self._add_path, methods=["POST"]),
            Route("/v1/paths/{name:path}", self._drop_path, methods=["DELETE"]),
            Route("/v1/chat/completions", partial(self._answer, is_chat=True), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, is_chat=False), methods=["POST"]),
            Route("/tokenize", partial(self._convert, convert=self._protocol.tokenize), methods=["POST"]),
            Route("/detokenize", partial(self._convert, convert=self._protocol.detokenize), methods=["POST"]),
            Route("/v1/responses", partial(self._answer, is_chat=True, is_response=True), methods=["POST"]),
        ]
        handlers = dict.fromkeys((HTTPException, Exception), lambda _, error: respond(error))
        middleware = [Middleware(AccessGate, access=self._access)]
        if self._access.origins:
            options: dict[str, Any] = {
                "allow_origins": self._access.origins,
                "allow_methods": ("GET", "POST", "DELETE"),
            }
            options |= {"allow_headers": ("*",), "expose_headers": ("Retry-After",), "allow_private_network": True}
            middleware.append(Middleware(CORSMiddleware, **options))
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    async def _metrics(self, request: Request) -> Response:
        self._access.check_key(request.headers)
        return PlainTextResponse(self._figures.text())

    async def _describe(self, request: Request) -> Response:
        self._access.check_key(request.headers)
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [dict(model.about) for model in self._models.models]})
        return JSONResponse(dict(self._find(name).about))

    async def _add_path(self, request: Request) -> Response:
        self._access.check_operator(request.headers)
        load_path = self._load_path
        if load_path is None:
            raise HTTPException(400, "this server's model has a path of its own: start it with the base as --model")
        asked = read_path(parse_json(await self._body(request)))
        self._models.check_free(asked.name)
        model = await anyio.to_thread.run_sync(load_path, asked.name, asked.path, limiter=self._loading)
        return JSONResponse(dict(self._models.add(model).about), status_code=201)

    async def _drop_path(self, request: Request) -> Response:
        self._access.check_operator(request.headers)
        model = self._find(request.path_params["name"])
        self._models.remove(model.name)
        return JSONResponse({"id": model.name, "object": "model", "deleted": True})

    def _find(self, name: str) -> ServedModel:
        """The model of an address; raises `HTTPException`."""
        try:
            return self._models.get(name)
        except InputError as error:
            raise HTTPException(404, str(error)) from None

    async def _convert(self, request: Request, *, convert: Callable[[bytes], dict[str, Any]]) -> Response:
        """Answer a request that needs the tokenizer alone."""
        self._access.check_key(request.headers)
        try:
            async with asyncio.timeout(self._limit):
                body = await self._body(request)
                return JSONResponse(await anyio.to_thread.run_sync(convert, body, limiter=self._readers))
        except Exception as error:
            return respond(error)

    async def _answer(self, request: Request, *, is_chat: bool, is_response: bool = False) -> Response:
        self._access.check_key(request.headers)
        try:
            response = await self._answered(request, is_chat=is_chat, is_response=is_response)
        except Exception as error:
            response = respond(error)
        self._figures.add_request(response.status_code)
        return response

    async def _answered(self, request: Request, *, is_chat: bool, is_response: bool) -> Response:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limit
        body = await self._body(request)
        async with asyncio.timeout_at(deadline):
            read = partial(self._read, body, is_chat=is_chat, is_response=is_response, query=dict(request.query_params))
            asked, repeated = await anyio.to_thread.run_sync(read, limiter=self._readers)
        queue: asyncio.Queue[Any] = asyncio.Queue()

        def tell(told: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, SCORED if told is None else told)

        answers = asked.answers if asked.is_answered else ()
        works = [Work(answer, tell, asked.model, is_traced=asked.body.trace) for answer in answers]
        scoring = [PieceWork(pieces, tell) for pieces in asked.scoring]
        self._engine.submit(works, scoring)
        cancel = partial(self._engine.cancel, [*works, *scoring])
        reply = Reply(asked, self._protocol.tokenizer, name=asked.model.name)
        chunks = self._follow(asked, reply, queue, deadline=deadline)
        response = None
        if repeated is not None:
            response = ResponseReply(asked.answers[0].settings, repeated, name=asked.model.name)
        if asked.body.stream:
            events = self._stream(chunks) if response is None else self._stream_response(response, chunks, reply)
            return _Stream(events, cancel)

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait(ClientDisconnect())

        watching = asyncio.ensure_future(watch())
        try:
            async for _ in chunks:
                pass
        finally:
            cancel()
            watching.cancel()
        return JSONResponse(reply.whole() if response is None else response.whole(reply.whole()))

    def _read(
        self, body: bytes, *, is_chat: bool, is_response: bool, query: Mapping[str, str]
    ) -> tuple[Asked, dict[str, Any] | None]:
        """Read a body; of one for `/v1/responses`, also the fields that the reply repeats."""
        if is_response:
            return read_response(self._protocol, body, query=query)
        return self._protocol.read(body, is_chat=is_chat, query=query), None

    async def _follow(
        self, asked: Asked, reply: Reply, queue: "asyncio.Queue[Any]", *, deadline: float
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a reply as its answers arrive; scored prompts come first."""
        unscored, early = len(asked.scoring), list[Any]()
        with self._figures.seconds.time():
            try:
                for chunk in () if unscored else reply.opening():
                    yield chunk
                while unscored or early or not reply.is_done:
                    if early and not unscored:
                        told = early.pop(0)
                    else:
                        async with asyncio.timeout_at(deadline):
                            told = await queue.get()
                    if isinstance(told, Exception):
                        raise told
                    if told is SCORED:
                        unscored -= 1
                        for chunk in () if unscored else reply.opening():
                            yield chunk
                    elif unscored:
                        early.append(told)
                    elif not isinstance(told, Piece):
                        reply.trace = told
                    elif told.ending == "broken":
                        raise InputError("its logits were not numbers, or its format grew too large: ask for less")
                    elif (added := reply.add(told)) is not None:
                        yield added
                if asked.body.stream_options.include_usage:
                    yield reply.last_chunk()
            finally:
                self._figures.add_usage(reply.usage())

    async def _stream(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:
                yield event(explain(error))
                return
        yield event("[DONE]")

    async def _stream_response(
        self, response: ResponseReply, chunks: AsyncIterator[dict[str, Any]], reply: Reply
    ) -> AsyncIterator[str]:
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            for told in response.opening():
                yield event(told, kind=told["type"])
            try:
                async for chunk in chunks:
                    for told in response.add(chunk):
                        yield event(told, kind=told["type"])
            except Exception as error:
                told = response.failure(explain(error))
                yield event(told, kind=told["type"])
                return
            for told in response.closing(reply.whole()):
                yield event(told, kind=told["type"])

    async def _body(self, request: Request) -> bytes:
        """Read the body; raises `HTTPException` if it is too large."""
        problem = HTTPException(413, f"a body has at most {self._longest_body} bytes: shorten it")
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._longest_body:
            raise problem
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._longest_body:
                raise problem
        return bytes(data)
