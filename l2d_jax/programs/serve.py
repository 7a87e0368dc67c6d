"""Serves a model over HTTP until a signal."""

import contextlib
import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

import jax

from l2d_jax import command_line
from l2d_jax.config.schema import MeshConfig
from l2d_jax.data.tokenizer import require_chat_template, require_tokenizer
from l2d_jax.decoding.batch.prefix_cache import PrefixCache
from l2d_jax.decoding.batch.prompt_reader import WHOLE, Service
from l2d_jax.decoding.memory import check_decoding_memory
from l2d_jax.distributed import runtime
from l2d_jax.distributed.memory import device_bytes
from l2d_jax.distributed.sharding import platform
from l2d_jax.errors import InputError, require
from l2d_jax.files import explained
from l2d_jax.loading import Folder, find, load
from l2d_jax.model.llm import LLM
from l2d_jax.serving.api.limits import BUDGET, DRAWS, RequestLimits
from l2d_jax.serving.engine import GROUPS, Engine
from l2d_jax.serving.models import Catalogue
from l2d_jax.serving.opening import Offers, PathOpener, check_paths

LANES, LANES_OF_CPUS = 8, 4  # with 15 evaluations each, four answers fill two cores: more only slow each other down
CACHE_SHARE = 16  # by default, the prefix cache takes at most this fraction of the memory: 1 / CACHE_SHARE


def run(options: Namespace, key: str | None, operator_key: str | None) -> None:
    """Load the models, and serve until a signal.

    Requests must bring `key`, if there is one, and those that load and drop paths `operator_key`.
    """
    with contextlib.ExitStack() as stack:
        _serve(options, key, operator_key, stack)


def _serve(options: Namespace, key: str | None, operator_key: str | None, stack: contextlib.ExitStack) -> None:
    try:
        from l2d_jax.serving.access import Access
        from l2d_jax.serving.api.protocol import Protocol
        from l2d_jax.serving.app import ServerApp
        from l2d_jax.serving.connections import make_server
        from l2d_jax.serving.front import Front, Readiness
        from l2d_jax.serving.process import listen_at, listening, url
        from l2d_jax.serving.warm_up import WarmUp, usual_requests
    except ImportError as error:
        raise InputError(f"a library of the server is missing ({error.name}): pip install 'l2d_jax[serve]'") from None
    access = Access(options.host, options.allow_host, options.allow_origin, key, operator_key)
    folder = find(options.workdir or options.model, dtype=options.dtype, **command_line.tokenizer_options(options))
    problem = f"--path adds paths to a language model, and {folder.path} has a path of its own"
    require(folder.path_config is None or not options.path, f"{problem}: give its base as --model, and it as --path")
    with explained(f"{options.host}:{options.port} cannot be listened on", "choose another --host or --port"):
        opened = listen_at(options.host, options.port)
    front = Front(readiness := Readiness())
    times = {"client_timeout": options.client_timeout, "drain": options.drain}
    server = make_server(front, max_connections=options.max_connections, **times)
    decode = stack.enter_context(listening(server, [opened], drain=options.drain))
    name = options.workdir.name if options.workdir else options.model
    models, opener, service = _open(options, folder, name, has_paths=bool(options.path or operator_key))
    bounds: dict[str, Any] = {"seconds": options.timeout, "longest_body": 1024 * options.max_body}
    engine, protocol = Engine(lanes=opener.lanes, queue=options.queue, service=service), Protocol(models)
    load_path = opener.open if folder.path_config is None else None
    front.app = ServerApp(engine, protocol, access=access, load_path=load_path, **bounds).routes()
    began, usual = time.monotonic(), usual_requests(models, has_prefixes=service.prefixes is not None)

    def prepare() -> None:
        WarmUp(engine, protocol, readiness=readiness).run(usual if options.warm_up == "usual" else [])
        if readiness.is_ready:
            print(f"ready after {time.monotonic() - began:.0f} s", flush=True)

    served = ", ".join(model.name for model in models.models)
    print(f"serving {served} at {url(opened)}", flush=True)
    decode(engine, prepare)


def _open(options: Namespace, folder: Folder, name: str, *, has_paths: bool) -> tuple[Catalogue, PathOpener, Service]:
    """Check the models and the memory that they need, and open them; raises `InputError`."""
    if options.deterministic:
        runtime.fix_programs()
    runtime.start_jax(MeshConfig())
    problem = f"--deterministic answers on one device, found {jax.device_count()}, whose sums depend on the lane"
    is_one = not options.deterministic or jax.device_count() == 1
    require(is_one, f"{problem}: start one server for each device, as by CUDA_VISIBLE_DEVICES, or leave the option out")
    require(jax.process_count() == 1, "a server is one process: start it on one host alone")
    lanes = options.lanes or (LANES_OF_CPUS if platform() == "cpu" else LANES)
    base = folder.find_base()
    require_chat_template(require_tokenizer(base.tokenizer))
    paths = check_paths(options.path, base, served=name)
    mesh = runtime.start_decoding(MeshConfig(), rows=lanes, kv_heads=base.architecture.num_key_value_heads)
    context = min(options.context, base.architecture.max_position_embeddings)
    chosen = [folder.defaults, *(path.defaults for path in paths)]
    draws = options.max_draws or max(DRAWS, *(own.draws for own in chosen))
    budget = options.max_budget or max(BUDGET, *(own.budget for own in chosen))
    limits = RequestLimits(context=context, answers=options.queue, budget=budget, draws=draws)
    offers = Offers(limits, options.efforts, has_paths=has_paths)
    for own, path in zip(chosen, [folder, *paths], strict=True):
        offers.check_defaults(own, str(path.path))
        offers.efforts_for(own, path.path_config)
    llm, rows = LLM.declare(base.architecture, dtype=folder.base.dtype), GROUPS * lanes + 1
    remedy = "--lanes, --context, --prefix_cache or --max_draws"
    cached = _cache_bytes(options.prefix_cache, llm, tokens=lanes * context)
    for own, path in zip(chosen, [folder, *paths], strict=True):
        most = replace(own, draws=draws)
        check_decoding_memory(llm, path.path_config, most, rows=rows, longest=context, remedy=remedy, cached=cached)
    loaded = load(
        options.workdir or options.model, mesh=mesh, dtype=options.dtype, **command_line.tokenizer_options(options)
    )
    models = Catalogue(offers.serve(name, loaded))
    opener = PathOpener(base, loaded, mesh, lanes, offers, models)
    for named, place in options.path:
        models.add(opener.open(named, place))
    prefixes = PrefixCache(loaded.model.llm, size=cached) if cached else None
    fixed = -(-context // WHOLE) * WHOLE if options.deterministic else None
    return models, opener, Service(prefixes=prefixes, context=fixed)


def _cache_bytes(given: int | None, llm: LLM, *, tokens: int) -> int:
    """The size of the prefix cache: `given`, in MiB, or room for so many `tokens` within a share of the memory."""
    if given is not None:
        return given * 2**20
    memory, wanted = device_bytes(), tokens * llm.token_bytes
    return wanted if memory is None else min(wanted, memory // CACHE_SHARE)
