"""The memory of a server with several paths: `python -m tests.serving.paths_memory 1 4 16`.

For each number of paths, a fresh process decodes 16 answers at a budget of 15 in 8 lanes, in which the paths take
turns. Base and paths have the sizes of SmolLM2-135M and random weights, in float32.
"""

import dataclasses
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from l2d_jax.config.config_file import read_config
from l2d_jax.config.schema import DecodeConfig, MeshConfig
from l2d_jax.decoding.generation import make_answers
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.distributed.memory import tree_bytes
from l2d_jax.distributed.sharding import initialize, make_mesh
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.serving.api.limits import RequestLimits
from l2d_jax.serving.engine import Engine, Work
from l2d_jax.serving.models import Catalogue, ServedModel

ANSWERS, LANES, NEW = 16, 8, 32
MIB = 2**20


def main(counts: list[int]) -> None:
    print("paths | base, MiB | one path, MiB | memory of the process, MiB | tokens/s")
    for count in counts:
        command = [sys.executable, "-m", "tests.serving.paths_memory", "--child", str(count)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="", flush=True)


def measure(count: int) -> None:
    """Print the row of one number of paths."""
    config = read_config("configs/smollm2_135m.py")
    architecture, mesh = Architecture.from_hf(config.model.architecture), make_mesh(MeshConfig())
    jax.set_mesh(mesh)
    llm = initialize(LLM.declare(architecture, dtype="float32"), jax.random.key(0), mesh)
    plain = Model.build(llm, None).merged()
    base = LoadedModel(plain, None, (), DecodeConfig(budget=1), is_copied=False)
    models = Catalogue(ServedModel("base", base, RequestLimits(), {}))
    for number in range(count):
        path = initialize(DiffusionPath.declare(config.path, architecture), jax.random.key(1 + number), mesh)
        loaded = dataclasses.replace(base, model=Model(llm=plain.llm, path=path, table=None))
        models.add(ServedModel(f"path-{number}", loaded, RequestLimits(), {}))
    engine = Engine(lanes=LANES, queue=ANSWERS)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        decode(engine, models)  # compiles
        began = time.monotonic()
        tokens = decode(engine, models)
        seconds = time.monotonic() - began
    finally:
        engine.close()
        thread.join()
    used = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB
    sizes = f"{tree_bytes(plain.llm) / MIB:,.0f} | {tree_bytes(models.models[1].loaded.model.path) / MIB:,.0f}"
    print(f"{count} | {sizes} | {used:,.0f} | {tokens / seconds:.1f}")


def decode(engine: Engine, models: Catalogue) -> int:
    """Decode one batch of answers; returns the number of tokens."""
    ended, tokens, paths = threading.Semaphore(0), list[int](), models.models[1:]
    settings = DecodeConfig(budget=15, max_new_tokens=NEW)

    def hear(told: Any) -> None:
        if isinstance(told, Exception):
            raise told
        tokens.append(len(told.tokens))
        if told.is_last:
            ended.release()

    for number in range(ANSWERS):
        model = paths[number % len(paths)]
        of_model = model.loaded.model
        request = Request([Prompt(0, [*range(1, 31)])], settings, seed=number)
        [answer] = make_answers(request, of_model.llm.architecture, of_model.path.config, first=number)
        engine.submit([Work(answer, hear, model)])
    for _ in range(ANSWERS):
        ended.acquire()
    return sum(tokens)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        measure(int(sys.argv[2]))
    else:
        main([int(count) for count in sys.argv[1:]])
