"""A tiny model behind the server, on a free port of this machine."""

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from l2d_jax.config.schema import DecodeConfig, MeshConfig
from l2d_jax.data import tokenizer
from l2d_jax.decoding.batch.prefix_cache import PrefixCache
from l2d_jax.decoding.batch.prompt_reader import Service
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.distributed.sharding import make_mesh
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.serving.access import Access
from l2d_jax.serving.api.limits import RequestLimits
from l2d_jax.serving.api.protocol import Protocol
from l2d_jax.serving.app import ServerApp
from l2d_jax.serving.connections import make_server
from l2d_jax.serving.engine import Engine
from l2d_jax.serving.front import Front, Readiness
from l2d_jax.serving.models import Catalogue, ServedModel
from l2d_jax.serving.warm_up import WarmUp
from tests.support import tiny

CONTEXT = 1024
ABOUT: dict[str, Any] = {"id": "tiny", "object": "model", "created": 0, "owned_by": "l2d_jax"}
ABOUT |= {"budgets": [1, 3, 7, 15, 31], "max_tokens": CONTEXT // 2, "has_path": True}


def talking_model(
    *, sizes: Mapping[str, Any] = MappingProxyType({}), dtype: str = "float32", **changes: Any
) -> LoadedModel:
    """A model with random weights whose tokens are bytes, and whose likeliest ones are visible and ASCII.

    `sizes` are entries of its `config.json`, and `changes` options of its path.
    """
    words = tokenizer.byte_tokenizer()
    architecture = Architecture.from_hf({**tiny.CONFIGS["llama"], "vocab_size": 264, **sizes})
    llm = tiny.randomise(LLM.declare(architecture, dtype=dtype))
    assert isinstance(llm.head, jax.Array)
    visible = (jnp.arange(264) >= 32) & (jnp.arange(264) < 127)
    llm = dataclasses.replace(llm, head=jnp.where(visible[:, None], llm.head, 0.0))
    path = tiny.randomise(DiffusionPath.declare(tiny.path_config(**changes), architecture), seed=1)
    defaults = DecodeConfig(budget=3, max_new_tokens=16)
    model = jax.device_put(Model.build(llm, path), NamedSharding(make_mesh(MeshConfig()), PartitionSpec()))  # as `load`
    return LoadedModel(model, words, tuple(tokenizer.stop_ids(words)), defaults)


def talking_base() -> LoadedModel:
    """The language model of `talking_model`."""
    whole = talking_model()
    defaults = DecodeConfig(budget=1, solver="euler", max_new_tokens=16)
    return dataclasses.replace(whole, model=Model.build(whole.model.llm, None), defaults=defaults)


def talking_path(base: LoadedModel, seed: int, **changes: Any) -> LoadedModel:
    """A path on `talking_base`, as a server opens it; `changes` are options of its config."""
    path = tiny.randomise(talking_model(**changes).model.path, seed=seed)
    defaults = DecodeConfig(budget=3, max_new_tokens=16)
    model = Model(llm=base.model.llm, path=path, table=None)
    return dataclasses.replace(base, model=model, defaults=defaults, is_copied=False)


def served(loaded: LoadedModel, *, name: str = "tiny", **limits: Any) -> ServedModel:
    """The model under a name."""
    has_path = loaded.model.path is not None
    about = ABOUT | {"id": name, "has_path": has_path, "budgets": [1, 3, 7, 15, 31] if has_path else [1]}
    return ServedModel(name, loaded, RequestLimits(**{"context": CONTEXT, **limits}), about)


def catalogue(loaded: LoadedModel, **limits: Any) -> Catalogue:
    return Catalogue(served(loaded, **limits))


@contextlib.contextmanager
def serving(
    loaded: LoadedModel | Catalogue,
    *,
    lanes: int = 4,
    queue: int = 256,
    seconds: float = 300.0,
    access: Access | None = None,
    client_timeout: float = 15.0,
    max_connections: int = 256,
    drain: float = 30.0,
    load_path: Callable[[str, str], ServedModel] | None = None,
    cached: int = 0,
    **limits: Any,
) -> Iterator[str]:
    """Serve a model, or several, and give the address; `cached` is the size of the prefix cache in bytes."""
    models = loaded if isinstance(loaded, Catalogue) else catalogue(loaded, answers=queue, **limits)
    prefixes = PrefixCache(models.get("").loaded.model.llm, size=cached) if cached else None
    engine = Engine(lanes=lanes, queue=queue, service=Service(prefixes=prefixes))
    protocol, bounds = Protocol(models), {"seconds": seconds, "longest_body": 2**16}
    app = ServerApp(engine, protocol, access=access or Access(), load_path=load_path, **bounds)
    front = Front(readiness := Readiness())
    front.app = app.routes()
    WarmUp(engine, protocol, readiness=readiness).run([])
    times = {"client_timeout": client_timeout, "drain": drain}
    decoding = threading.Thread(target=run_in_mesh, args=[engine])
    decoding.start()
    try:
        with listening(front, max_connections=max_connections, **times) as url:
            yield url
    finally:
        engine.close()
        decoding.join()


def run_in_mesh(engine: Engine) -> None:
    """Run an engine as the program does, under a mesh."""
    with jax.set_mesh(make_mesh(MeshConfig())):
        engine.run()


@contextlib.contextmanager
def listening(app: Any, **limits: Any) -> Iterator[str]:
    """Serve an application on a free port of this machine, and give the address; at the end it drains."""
    options = {"client_timeout": 15.0, "max_connections": 256, "drain": 30.0} | limits
    server = make_server(app, **options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.02)
            yield url
        finally:
            server.should_exit = True
            thread.join()
