"""Measures the published class in PyTorch, eager and compiled, in the shape and dtype that JAX was measured with.

Weights are random. Decoding is by transformers' `generate`, one evaluation after the other; a token's time is the
difference of two lengths, so that the prefill does not count. Training is a step with a loss at every position and
AdamW.
"""

import shutil
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tests.device.options import Options
from tests.device.table import LEFT_OUT, Rows

REPEATS = 3  # timed runs, after one that warms up; the median counts
NEW = 8  # tokens that are timed


def run(rows: Rows, options: Options) -> None:
    """Rows of decoding or of training, or one that says why there are none."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        rows.add("-", "torch is not installed", status=LEFT_OUT)
        return
    import torch

    if not options.rehearse and not torch.cuda.is_available():
        rows.add("-", f"torch {version} finds no GPU", status=LEFT_OUT)
        return
    torch.manual_seed(0)
    device = "cpu" if options.rehearse else "cuda"
    if options.rehearse:
        torch.set_num_threads(1)  # tiny products would wait for other threads
    measure = {"PyTorch decoding": decode, "PyTorch training": train}[rows.part]
    with rows.guard("eager"):
        measure(rows, options, build(options, device), kind="eager")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        rows.add("compiled", "torch.compile needs a C compiler: there is no cc, gcc or clang", status=LEFT_OUT)
        return
    with rows.guard("compiled"):
        measure(rows, options, build(options, device), kind="compiled")


def build(options: Options, device: str) -> Any:
    """The published class with random weights, on a device."""
    import torch
    import transformers

    from l2d_jax.weights.pytorch.configuration_l2d import L2DConfig
    from l2d_jax.weights.pytorch.modeling_l2d import L2DForCausalLM
    from tests.device.decoding import configure

    config = configure(options)
    described = dict(config.model.architecture or {})
    [name] = described.pop("architectures")
    text = getattr(transformers, name).config_class(**described)
    with torch.device(device):
        dtype = getattr(torch, config.model.dtype)
        lm = transformers.AutoModelForCausalLM.from_config(text, dtype=dtype, attn_implementation="sdpa")
        return L2DForCausalLM(L2DConfig(path=vars(config.path), text_config=lm.config), lm.to(device)).eval()


def decode(rows: Rows, options: Options, model: Any, *, kind: str) -> None:
    """A row for each budget at the first batch size; compiled, only for the largest, since compiling takes long."""
    import torch

    batch, vocabulary = options.batches[0], model.config.text_config.vocab_size
    prompts = torch.randint(vocabulary, (batch, options.prompt), device=model.device)
    chosen: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "solver": "midpoint"}
    if kind == "compiled":
        model.forward = torch.compile(model.forward, backend=backend(options))
        chosen |= {"cache_implementation": "static", "disable_compile": True}  # compiled here, not by transformers
    for budget in options.budgets if kind == "eager" else [max(options.budgets)]:

        def generate(new: int, budget: int = budget) -> None:
            with torch.no_grad():
                model.generate(prompts, max_new_tokens=new, budget=budget, **chosen)

        long, short = (median(generate, length) for length in (NEW + 1, 1))
        seconds = (long - short) / NEW
        text = f"{1000 * seconds:.2f} ms/token, {batch / seconds:,.1f} tokens/s"
        figures: Any = {"seconds per token": seconds, "batch": batch, "budget": budget}
        rows.add(f"{kind}, batch {batch}, budget {budget}", text, beside_ours(options, figures), **figures)


def backend(options: Options) -> str:
    """What compiles the graphs; a rehearsal only runs them as they were traced, since C++ on CPUs takes minutes."""
    return "eager" if options.rehearse else "inductor"


def beside_ours(options: Options, theirs: dict[str, Any]) -> str:
    """How many times as fast ours is, in each order of evaluations."""
    found = [row.figures for row in options.rows_of("decoding") if "order" in row.figures]
    same = [one for one in found if all(one[name] == theirs[name] for name in ("batch", "budget"))]
    parts = [
        f"{one['order']} {theirs['seconds per token'] / one['seconds per token']:.2f} x"
        f" ({1000 * one['seconds per token']:.2f} ms)"
        for one in same
    ]
    return f"/ JAX above: {', '.join(parts)}" if parts else "JAX was not measured"


def train(rows: Rows, options: Options, model: Any, *, kind: str) -> None:
    """A row for a step, in micro-batches that fit into memory."""
    import torch

    is_on_gpu, count = model.device.type == "cuda", options.rows // options.torch_rows
    tokens = torch.randint(
        model.config.text_config.vocab_size, (count, options.torch_rows, options.length + 1), device=model.device
    )
    weights = [weight for weight in model.train().parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(weights, lr=1e-4, fused=is_on_gpu)
    forward = torch.compile(model, backend=backend(options)) if kind == "compiled" else model

    def step() -> None:
        total = 0.0
        for micro in tokens:
            loss = forward(micro[:, :-1], shift_labels=micro[:, 1:], return_logits=False).loss / count
            loss.backward()
            total += loss.detach()
        adam.step()
        adam.zero_grad()
        float(total)

    seconds = median(step)
    trained = count * options.torch_rows * options.length
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most" if is_on_gpu else ""
    text = f"{trained / seconds:,.0f} tokens/s, {seconds:.3f} s per step{memory}"
    ours = [
        row.figures["tokens per second"] for row in options.rows_of("training") if "tokens per second" in row.figures
    ]
    beside = (
        f"/ JAX above: {trained / seconds / ours[0]:.2f} x ({ours[0]:,.0f} tokens/s)"
        if ours
        else "JAX was not measured"
    )
    name = f"{kind}, {count} x {options.torch_rows} rows of {options.length} tokens"
    figures: Any = {"tokens per second": trained / seconds, "seconds per step": seconds}
    rows.add(name, text, beside, **figures)


def median(work: Callable[..., None], *given: Any) -> float:
    """Median seconds of a piece of work, after a run that warms up."""
    import torch

    found = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        work(*given)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return sorted(found[1:])[REPEATS // 2]
