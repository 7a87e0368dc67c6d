"""Serves a model over HTTP with OpenAI's API and a page: `python -m l2d_jax.serve --workdir DIR --port 8000`.

Each request may have a budget of its own, and further options of decoding by name. With `L2D_JAX_API_KEY` in the
environment, requests must bring that key. SIGTERM or Ctrl-C lets those under way be answered first.
"""

import os
import signal
import socket
import threading
from typing import Any

import jax

from l2d_jax import command_line
from l2d_jax.config.schema import MeshConfig
from l2d_jax.data.tokenizer import require_chat_template, require_tokenizer
from l2d_jax.decoding.requests import check_decoding_memory
from l2d_jax.decoding.solver import FIXED
from l2d_jax.distributed import runtime
from l2d_jax.errors import InputError, require
from l2d_jax.files import explained
from l2d_jax.loading import find, load
from l2d_jax.model.llm import LLM
from l2d_jax.weights import model_folder

KEY = "L2D_JAX_API_KEY"
BUDGETS = (1, 3, 7, 15, 31)  # that the page offers


def main() -> None:
    """Parse the command line, load the model, and serve until a signal."""
    options = _parse()
    try:
        import uvicorn

        from l2d_jax.serving.app import ServerApp
        from l2d_jax.serving.engine import KINDS, Engine
        from l2d_jax.serving.protocol import Protocol
    except ImportError as error:
        raise InputError(f"a library of the server is missing ({error.name}): pip install 'l2d_jax[serve]'") from None
    folder = find(options.workdir or options.model, dtype=options.dtype, **command_line.texts_of(options))
    with explained(f"{options.host}:{options.port} cannot be listened on", "choose another --host or --port"):
        listening = socket.create_server((options.host, options.port))
    runtime.start_jax(MeshConfig())
    require(jax.process_count() == 1, "a server is one process: start it on one host alone")
    base = model_folder.find_base(folder.base)
    require_chat_template(require_tokenizer(base.tokenizer))
    mesh = runtime.start_decoding(MeshConfig(), rows=options.lanes, kv_heads=base.architecture.num_key_value_heads)
    context = min(options.context, base.architecture.max_position_embeddings)
    llm, rows = LLM.declare(base.architecture, dtype=folder.base.dtype), KINDS * options.lanes + 1
    remedy = "--lanes or --context"
    check_decoding_memory(llm, folder.path_config, folder.defaults, rows=rows, longest=context, remedy=remedy)
    loaded = load(options.workdir or options.model, mesh=mesh, dtype=options.dtype, **command_line.texts_of(options))
    name = options.workdir.name if options.workdir else options.model
    engine = Engine(loaded, lanes=options.lanes, queue=options.queue)
    protocol = Protocol(loaded, name=name, context=context)
    has_path, solver = loaded.model.path is not None, FIXED.get(loaded.defaults.solver)
    budgets = [n for n in BUDGETS if n == 1 or (has_path and (solver is None or solver.spendable(n) == n))]
    about: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "l2d_jax", "budgets": budgets}
    about |= {"max_tokens": context // 2, "has_path": has_path}
    limits: dict[str, Any] = {"seconds": options.timeout, "longest_body": 1024 * options.max_body}
    app = ServerApp(engine, protocol, about=about, key=os.environ.get(KEY) or None, **limits)
    server = uvicorn.Server(uvicorn.Config(app.routes(), log_level="critical"))
    host, port = listening.getsockname()[:2]
    print(f"serving {name} at http://{host}:{port}", flush=True)
    _serve(engine, server, listening)


def _serve(engine: Any, server: Any, listening: socket.socket) -> None:
    """Decode in this thread, and talk HTTP in another, until a signal ends both."""

    def listen() -> None:
        try:
            server.run(sockets=[listening])
        finally:
            engine.close()

    def drain(*_: Any) -> None:
        if server.should_exit:
            os._exit(1)
        print("ending: requests under way are answered first; a second signal ends at once", flush=True)
        server.should_exit = True

    former = {number: signal.signal(number, drain) for number in (signal.SIGINT, signal.SIGTERM)}
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        engine.run()
    finally:
        server.should_exit = True
        thread.join()
        for number, handler in former.items():
            signal.signal(number, handler)


def _parse() -> Any:
    parser = command_line.Parser(prog="python -m l2d_jax.serve", description=__doc__)
    command_line.add_source(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "int8"], help="of weights and products")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: reachable from outside")
    parser.add_argument("--port", type="Port", default=8000, help="0: a free one")
    parser.add_argument("--lanes", type="Rows", default=8, help="answers that are decoded at a time")
    parser.add_argument("--queue", type="Count", default=64, help="answers that may wait for a lane; others get 429")
    parser.add_argument("--context", type="Tokens", default=2048, help="tokens of a prompt and its answer, at most")
    parser.add_argument("--timeout", type="Seconds", default=600.0, help="the longest a request may take, in seconds")
    parser.add_argument("--max_body", type="Count", default=1024, help="the largest body of a request, in KiB")
    return parser.parse_args()


if __name__ == "__main__":
    command_line.run(main)
