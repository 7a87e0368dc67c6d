"""Serves a model over HTTP until a signal."""

import contextlib
import os
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import jax

from l2d_jax import command_line
from l2d_jax.config.schema import DecodeConfig, MeshConfig, PathConfig
from l2d_jax.data.tokenizer import require_chat_template, require_tokenizer
from l2d_jax.decoding.prefix_cache import PrefixCache
from l2d_jax.decoding.prompt_reader import WHOLE
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.decoding.requests import check_decoding_memory
from l2d_jax.distributed import runtime
from l2d_jax.distributed.memory import device_bytes
from l2d_jax.errors import InputError, require
from l2d_jax.files import explained
from l2d_jax.loading import find, load
from l2d_jax.model.llm import LLM

BUDGETS = (1, 3, 7, 15, 31)  # budgets that the page offers
EFFORTS = {"none": 1, "low": 3, "medium": 7, "high": 15}  # offered if the model can spend them
CACHE_SHARE = 16  # by default, the prefix cache takes at most this fraction of the memory: 1 / CACHE_SHARE
GRACE = 5.0  # seconds after the last connection in which running computations may finish


def run(options: Namespace, key: str | None) -> None:
    """Load the model, and serve until a signal. Requests must bring `key`, if there is one."""
    try:
        from l2d_jax.serving.access import Access
        from l2d_jax.serving.api.limits import BUDGET, DRAWS, RequestLimits
        from l2d_jax.serving.api.protocol import Protocol
        from l2d_jax.serving.app import ServerApp
        from l2d_jax.serving.connections import make_server
        from l2d_jax.serving.engine import KINDS, Engine
    except ImportError as error:
        raise InputError(f"a library of the server is missing ({error.name}): pip install 'l2d_jax[serve]'") from None
    access = Access(options.host, options.allow_host, options.allow_origin, key)
    folder = find(options.workdir or options.model, dtype=options.dtype, **command_line.tokenizer_options(options))
    with explained(f"{options.host}:{options.port} cannot be listened on", "choose another --host or --port"):
        listening = socket.create_server((options.host, options.port))
    if options.deterministic:
        runtime.fix_programs()
    runtime.start_jax(MeshConfig())
    problem = f"--deterministic answers on one device, found {jax.device_count()}, whose sums depend on the lane"
    is_one = not options.deterministic or jax.device_count() == 1
    require(is_one, f"{problem}: start one server for each device, as by CUDA_VISIBLE_DEVICES, or leave the option out")
    require(jax.process_count() == 1, "a server is one process: start it on one host alone")
    base = folder.find_base()
    require_chat_template(require_tokenizer(base.tokenizer))
    mesh = runtime.start_decoding(MeshConfig(), rows=options.lanes, kv_heads=base.architecture.num_key_value_heads)
    context = min(options.context, base.architecture.max_position_embeddings)
    path, own = folder.path_config, folder.defaults
    draws = options.max_draws or max(DRAWS, own.draws)
    budget = options.max_budget or max(BUDGET, own.budget)
    problem = f"the model's own options are a budget of {own.budget} and {own.draws} draws"
    require(own.budget <= budget and own.draws <= draws, f"{problem}: raise --max_budget or --max_draws to them")
    efforts = _efforts(options.efforts, own, path, most=budget)
    limits = RequestLimits(context=context, answers=options.queue, budget=budget, draws=draws, efforts=efforts)
    llm, rows = LLM.declare(base.architecture, dtype=folder.base.dtype), KINDS * options.lanes + 1
    remedy, settings = "--lanes, --context, --prefix_cache or --max_draws", replace(own, draws=draws)
    cached = _cache_bytes(options.prefix_cache, llm, tokens=options.lanes * context)
    check_decoding_memory(llm, path, settings, rows=rows, longest=context, remedy=remedy, cached=cached)
    prefixes = PrefixCache(llm, size=cached) if cached else None
    loaded = load(
        options.workdir or options.model, mesh=mesh, dtype=options.dtype, **command_line.tokenizer_options(options)
    )
    name = options.workdir.name if options.workdir else options.model
    fixed = -(-context // WHOLE) * WHOLE if options.deterministic else None
    engine = Engine(loaded, lanes=options.lanes, queue=options.queue, prefixes=prefixes, context=fixed)
    protocol = Protocol(loaded, name=name, limits=limits)
    budgets = [n for n in BUDGETS if n <= budget and _is_spendable(n, own, path)]
    about: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "l2d_jax", "budgets": budgets}
    about |= {"max_tokens": context // 2, "has_path": path is not None, "max_budget": budget, "max_draws": draws}
    about |= {"efforts": dict(efforts)}
    bounds: dict[str, Any] = {"seconds": options.timeout, "longest_body": 1024 * options.max_body}
    app = ServerApp(engine, protocol, access=access, about=about, **bounds)
    times = {"client_timeout": options.client_timeout, "drain": options.drain}
    server = make_server(app.routes(), max_connections=options.max_connections, **times)
    host, port = listening.getsockname()[:2]
    print(f"serving {name} at http://{host}:{port}", flush=True)
    _serve(engine, server, listening, drain=options.drain)


def _cache_bytes(given: int | None, llm: LLM, *, tokens: int) -> int:
    """The size of the prefix cache: `given`, in MiB, or room for so many `tokens` within a share of the memory."""
    if given is not None:
        return given * 2**20
    memory, wanted = device_bytes(), tokens * llm.token_bytes
    return wanted if memory is None else min(wanted, memory // CACHE_SHARE)


def _is_spendable(budget: int, settings: DecodeConfig, path: PathConfig | None) -> bool:
    try:
        check_settings(replace(settings, budget=budget), path)
    except InputError:
        return False
    return True


def _efforts(
    given: Mapping[str, int] | None, settings: DecodeConfig, path: PathConfig | None, *, most: int
) -> Mapping[str, int]:
    """The budgets of reasoning efforts; raises `InputError` for a budget that cannot be spent."""
    if given is None:
        kept = {name: n for name, n in EFFORTS.items() if n <= most}
        return {name: n for name, n in kept.items() if _is_spendable(n, settings, path)}
    for name, budget in given.items():
        try:
            check_settings(replace(settings, budget=budget), path)
        except InputError as error:
            raise InputError(f"--efforts {name}={budget}: {error}") from None
        require(budget <= most, f"--efforts {name}={budget} exceeds --max_budget {most}: raise that")
    return given


def _serve(engine: Any, server: Any, listening: socket.socket, *, drain: float) -> None:
    """Decode in this thread, and serve HTTP in another one, until a signal ends both."""

    def leave(status: int) -> NoReturn:
        with contextlib.suppress(OSError):
            print("ended while the devices were computing what nobody waits for", flush=True)
        os._exit(status)

    def leave_after(seconds: float, status: int) -> None:
        timer = threading.Timer(seconds, leave, [status])
        timer.daemon = True
        timer.start()

    def listen() -> None:
        try:
            server.run(sockets=[listening])
        finally:
            engine.close()
            leave_after(GRACE, 0)

    def end(*_: Any) -> None:
        if server.should_exit:
            os._exit(1)
        with contextlib.suppress(OSError):
            print(f"ending within {drain:g} s: requests under way are answered first", flush=True)
        server.should_exit = True
        leave_after(drain + 2 * GRACE, 1)

    former = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        engine.run()
    finally:
        server.should_exit = True
        thread.join()
        for number, handler in former.items():
            signal.signal(number, handler)
