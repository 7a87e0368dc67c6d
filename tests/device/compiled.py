"""Compiles decoding or a training step for NVIDIA GPUs on a machine without one, and counts the kernels.

    pip install jax-cuda12-pjrt==VERSION_OF_JAX nvidia-cuda-nvcc-cu12
    python -m tests.device.compiled --config llama1b --batch 1 --budget 15
    python -m tests.device.compiled --config llama1b --work train --gpus 8

XLA needs a description of the GPU, which `GPUS` has. It times no kernels without a GPU, so it may choose others than
on one. cuDNN's attention is not compiled: XLA's is counted instead.
"""

import argparse
import importlib.util
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax._src import xla_bridge
from jax.experimental import topologies

from l2d_jax.config.config_file import read_config
from l2d_jax.distributed.sharding import decoding_mesh, make_mesh
from l2d_jax.performance import lowering
from l2d_jax.performance.hlo import Computation, HloProgram, Instruction, size_in_bytes
from l2d_jax.weights import base_model

# Multiprocessors, bytes per second of memory, bytes of memory; all are of compute capability 9.0.
GPUS = {"H100": (132, 3_350_000_000_000, 80 * 2**30), "H200": (132, 4_800_000_000_000, 141 * 2**30)}
NO_KERNEL = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
NO_KERNEL += ("after-all", "partition-id", "fusion-done", "all-gather-done", "all-reduce-done", "async-done")


def describe(name: str) -> str:
    """The description of a GPU that XLA's plugin reads, as text of its protocol buffer."""
    units, rate, memory = GPUS[name]
    facts: dict[str, Any] = {"threads_per_warp": 32, "threads_per_block_limit": 1024, "threads_per_core_limit": 2048}
    facts |= {"block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535}
    facts |= {"shared_memory_per_block": 49152, "shared_memory_per_block_optin": 232448}
    facts |= {"shared_memory_per_core": 233472, "registers_per_core_limit": 65536, "registers_per_block_limit": 65536}
    facts |= {"core_count": units, "fpus_per_core": 128, "clock_rate_ghz": 1.98, "l2_cache_size": 50 * 2**20}
    facts |= {"memory_bandwidth": rate, "device_memory_size": memory, "cuda_compute_capability": "{ major: 9 }"}
    lines = [f"  {key}{'' if str(value)[0] == '{' else ':'} {value}" for key, value in facts.items()]
    versions = "dnn_version_info { major: 9 minor: 7 }\nruntime_version { major: 12 minor: 8 patch: 0 }"
    inside = "\n".join(lines)
    return f'gpu_device_info {{\n{inside}\n}}\nplatform_name: "CUDA"\n{versions}\ndevice_description_str: "{name}"'


def find_package(name: str) -> Path | None:
    """The folder of a package, which is not imported."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of the package above it
        return None
    return Path(next(iter(found.submodule_search_locations or []))) if found else None


def described_gpus(name: str, count: int) -> list[jax.Device]:
    """Descriptions of `count` GPUs of one host; ends the process without XLA's plugin for CUDA."""
    tools = find_package("nvidia.cuda_nvcc")
    if find_package("jax_plugins.xla_cuda12") is None or tools is None:
        packages = f"jax-cuda12-pjrt=={jax.__version__} nvidia-cuda-nvcc-cu12"
        sys.exit(f"XLA's compiler for CUDA is not here: pip install {packages}")
    os.environ["PATH"] += f":{tools / 'bin'}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={tools}"
    jax.config.update("jax_enable_compilation_cache", False)  # a kept program could be read by a GPU alone
    jax.devices()  # loads the plugin
    shape = f"1x1x{count}"
    described = topologies.get_topology_desc(shape, platform="cuda", topology=shape, target_config=describe(name))
    known = xla_bridge.canonicalize_platform  # which knows only platforms that have a device
    xla_bridge.canonicalize_platform = lambda platform: "cuda" if platform == "gpu" else known(platform)
    return list(described.devices)


def is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode not in NO_KERNEL


def traffic(instruction: Instruction, computation: Computation) -> int:
    """Bytes of the operands and of the result: no kernel moves more, and one that reads a slice moves less."""
    sizes = (size_in_bytes(computation[name]) for name in instruction.operands if name in computation)
    return size_in_bytes(instruction) + sum(sizes)


def kernels(program: HloProgram) -> dict[str, list[Instruction]]:
    """The kernels of each computation that is run as it stands, those with most kernels first."""
    fused = {
        name
        for computation in program.computations.values()
        for one in computation.values()
        if one.opcode not in ("while", "conditional", "call")
        for name in one.called
    }
    found = {
        name: [*filter(is_kernel, computation.values())]
        for name, computation in program.computations.items()
        if name not in fused
    }
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def report(program: HloProgram, *, top: int) -> None:
    """Print how many kernels the largest computations have, and their most frequent kernels."""
    for name, run in [*kernels(program).items()][:2]:
        inside, counts, moved = program.computations[name], Counter[str](), Counter[str]()
        for one in run:
            kind = f"{re.sub(r'[.0-9]+$', '', one.name)} -> {one.shape.strip().partition('{')[0][:60]}"
            counts[kind] += 1
            moved[kind] += traffic(one, inside)
        print(f"{name}: {len(run)} kernels, {sum(moved.values()) / 1e9:.2f} GB of operands and results")
        for kind, count in counts.most_common(top):
            print(f"  {count:4d}  {moved[kind] / 1e6:9.1f} MB  {kind}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama1b")
    parser.add_argument("--work", choices=("decode", "train"), default="decode")
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of one host")
    parser.add_argument("--batch", type=int, default=1, help="decoding: sequences at a time")
    parser.add_argument("--prompt", type=int, default=64, help="decoding: tokens of each prompt")
    parser.add_argument("--budget", type=int, default=15)
    parser.add_argument("--top", type=int, default=30, help="number of kinds of kernels that are listed")
    parser.add_argument("--hlo", type=Path, help="file for the optimized program")
    options = parser.parse_args()
    devices = described_gpus(options.gpu, options.gpus)
    config = read_config(options.config, {"decode.budget": options.budget, "decode.max_new_tokens": 8})
    order = ""
    if options.work == "train":
        lowered = lowering.lower_train(config, make_mesh(config.mesh, devices))
    else:
        heads = base_model.read_architecture(config.model).num_key_value_heads
        sizes = decoding_mesh(config.mesh, rows=options.batch, kv_heads=heads, devices=len(devices))
        chosen: dict[str, Any] = {"batch": options.batch, "prompt": options.prompt, "memory": None}
        lowered, way = lowering.lower_decode(config, make_mesh(sizes, devices), **chosen)
        order = f", evaluations: {way.value}"
    began = time.monotonic()
    compiled = lowered.compile()
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    if options.hlo:
        options.hlo.write_text(text)
    needed = sum(getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    needed -= memory.alias_size_in_bytes
    print(f"{options.work} of {options.config} on {len(devices)} {options.gpu}{order}")
    print(f"compiled in {time.monotonic() - began:.0f} s; {needed / 2**30:.2f} GiB of each GPU's memory")
    report(HloProgram.parse(text), top=options.top)


if __name__ == "__main__":
    main()
