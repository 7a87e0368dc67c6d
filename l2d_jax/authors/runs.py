"""Runs the release's ODE solvers, of which every evaluation is noted, and its own generation on prompts."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from l2d_jax.authors.release_model import Release

Arrays = dict[str, np.ndarray]

NEAR_END = 63 / 64
TOLERANCE = 3e-4  # absolute and relative, of the adaptive solvers
FIRST_STEP = 0.05  # of the adaptive solvers, as the release sets it
MOST_EVALUATIONS = 1200  # of an adaptive run, which may chatter at the edges of an arg max
ADAPTIVE = ("fehlberg2", "adaptive_heun", "bosh3")
# The smallest lead of the likeliest token over the second with which a run counts as robust. An error of the logits
# changes the states of an adaptive run also through the length of its steps.
FIXED_MARGIN, ADAPTIVE_MARGIN = 2e-4, 1e-3
MOST_NEW_TOKENS = 6  # of a generation


class Integration(NamedTuple):
    """One integration, named as in a recording."""

    name: str
    mode: str  # seq: all positions without a cache; seqcache: with one; last: the last position from the cache
    method: str
    ode_steps: int
    final_timestep: float = 1.0
    rows: slice = slice(None)
    is_padded: bool = False
    x1_estimation: str = "sample"  # or the average over the vocabulary
    temperature: float | None = None  # None: the model's own
    annealed: bool = False  # T(t) = 1 - t in place of the model's own
    w_g: float | None = None  # strength of the guidance


def fixed_step_runs(*, classes: int) -> list[Integration]:
    """Every solver, mode and velocity at least once."""
    runs = [Integration("euler15.last", "last", "euler", 15), Integration("rk45.last", "last", "rk4", 5)]
    runs += [Integration("heun28.last", "last", "heun2", 8), Integration("heun36.last", "last", "heun3", 6)]
    runs += [Integration("midpoint8.last", "last", "midpoint", 8), Integration("midpoint8.seq", "seq", "midpoint", 8)]
    runs += [Integration(f"{run.name}.f63", run.mode, run.method, run.ode_steps, NEAR_END) for run in runs[:5]]
    base = runs[4]
    runs += [
        base._replace(name="midpoint8.seqcache", mode="seqcache"),
        base._replace(name="midpoint8.last.pad", is_padded=True),
        base._replace(name="midpoint8.seq.avgT1", mode="seq", x1_estimation="average", temperature=1.0),
        base._replace(name="midpoint8.last.avgpoly", x1_estimation="average", annealed=True),
        base._replace(name="midpoint8.last.sampleT1", temperature=1.0),
        base._replace(name="midpoint8.last.samplepoly", annealed=True),
    ]
    if classes:
        runs += [base._replace(name=f"midpoint8.last.w{w}", w_g=w) for w in (0.0, 1.0, 1.5)]
        runs += [runs[0]._replace(name="euler15.seq.w1.5", mode="seq", w_g=1.5)]
    return runs


def adaptive_runs() -> list[Integration]:
    """Every adaptive solver, for one row and for two that share an error norm."""
    runs = []
    for method in ADAPTIVE:
        run = Integration(f"{method}.last", "last", method, 8, NEAR_END)
        mean = run._replace(x1_estimation="average", temperature=1.0)
        runs += [
            run._replace(name=f"{method}.last.f63.b2"),
            run._replace(name=f"{method}.last.f1.b1", final_timestep=1.0, rows=slice(0, 1)),
            mean._replace(name=f"{method}.last.f63.b1r1.avgT1", rows=slice(1, 2)),
            mean._replace(name=f"{method}.last.f63.b2.avgT1"),
        ]
    return [*runs, mean._replace(name=f"{method}.seq.f63.b2.avgT1", mode="seq")]


def record_run(
    release: Release, model: Any, family: str, run: Integration, inputs: Mapping[str, Any]
) -> tuple[Arrays, Any]:
    """The arrays of one run, under their names in a recording, and its description.

    `inputs` has `input_ids`, `class_labels` (None without classes), `x0` at all positions, and the padded batch.
    """
    torch, rows = release.torch, run.rows
    ids, x0 = inputs["input_ids"][rows], inputs["x0"][rows]
    labels = None if run.w_g is None else inputs["class_labels"][rows]
    placing = {"position_ids": torch.arange(ids.shape[1]).expand(ids.shape)}
    if run.is_padded:
        ids = inputs["lp.input_ids"]
        placing = {"attention_mask": inputs["lp.attention_mask"], "position_ids": inputs["lp.position_ids"]}
    cached: dict[str, Any] = {}
    if run.mode == "last":  # as the release's generation does: a pass over the prompt, then the last position alone
        with torch.no_grad():
            empty = release.transformers.DynamicCache()
            prompt = {"past_key_values": empty, "output_cached_final_hidden_states": True, "use_cache": True}
            read = model.model(input_ids=ids, **prompt, **placing)
        cached = {name: read[name] for name in ("past_key_values", "cached_final_hidden_states")}
        cached["cached_final_hidden_states"] = cached["cached_final_hidden_states"][:, -1:]
        ids, x0 = ids[:, -1:], x0[:, -1:]
        placing["position_ids"] = placing["position_ids"][:, -1:]
    solver: dict[str, Any] = {"method": run.method, "atol": TOLERANCE, "rtol": TOLERANCE}
    if run.method in ADAPTIVE:
        solver["options"] = {"first_step": FIRST_STEP}
    named = ("mode", "method", "ode_steps", "w_g", "final_timestep", "x1_estimation")
    described: dict[str, Any] = {name: getattr(run, name) for name in named} | {"tol": TOLERANCE}
    described["temperature"] = "model default" if run.temperature is None else run.temperature
    described["class_labels"] = None if labels is None else labels.tolist()
    is_cached = run.mode != "seq"
    given = {"input_ids": ids, "class_labels": labels, **placing}
    polynomial = partial(import_module("flow_llms.utils").polynomial_temperature, p=1.0, end_t=1.0)
    annealing = mock.patch.multiple(model.model, fixed_temperature=False, nstep_temperature_schedule_fn=polynomial)
    with _watched(release, model, family) as seen, annealing if run.annealed else nullcontext():
        try:
            result = model.nstep_inference(
                initial_flow_representation_embeds=x0,
                ode_kwargs=solver,
                final_timestep=run.final_timestep,
                ode_steps=run.ode_steps,
                only_last_token_prediction=run.mode == "last",
                precompute_non_flow_path=is_cached,
                x1_estimation=run.x1_estimation,
                temperature_schedule=run.temperature,
                guidance_parameter=run.w_g,
                **cached,
                **given,
            )
        except (AssertionError, RuntimeError) as error:  # torchdiffeq asserts that its step does not underflow
            return {}, {"error": str(error), "robust": False}
    trajectory = result.flow_trajectory.float()
    if is_cached:
        cached = {name: result[name] for name in ("past_key_values", "cached_final_hidden_states")}
    with torch.no_grad():
        last = {"timesteps": result.timestep_trajectory[-1], "flow_representation_embeds": trajectory[-1]}
        logits = model(**last, **(cached or {"use_cache": False}), **given).logits
    states = {"x0": x0, "t_grid": result.timestep_trajectory, "traj": trajectory, "logits": logits}
    arrays = {name: state.numpy() for name, state in states.items()}
    arrays |= {name: np.array(seen[name]) for name in ("times", "argmax", "temps", "samples") if seen[name]}
    is_chattering = run.method in ADAPTIVE and run.x1_estimation == "sample"
    margin, least = min(seen["margins"]), ADAPTIVE_MARGIN if is_chattering else FIXED_MARGIN
    is_finite = bool(np.all(np.isfinite(arrays["traj"])))
    described |= {"nfe": len(seen["times"]), "net_evals": len(seen["margins"]), "min_margin": margin}
    described |= {"finite": is_finite, "robust": is_finite and margin > least}
    return {f"ode.{run.name}.{name}": array for name, array in arrays.items()}, described


def record_generations(
    release: Release, model: Any, prompts: list[list[int]], *, noise: Callable[..., Any], labels: Any, pad: int
) -> dict[str, Any]:
    """Greedy answers by the release's own loop ("base": of the LM); `noise` makes normal noise by name and shape."""
    torch, decode = release.torch, release.function("pipeline/decoding_util.py", "autoregressive_decode")
    count, width = MOST_NEW_TOKENS, model.model.flow_representation_dim
    inference, known = model.nstep_inference, signature(model.nstep_inference).parameters

    def tolerant(**options: Any) -> Any:  # the release's Qwen lacks an argument that its loop passes
        return inference(**{name: value for name, value in options.items() if name in known})

    outputs = {}
    for name, method, points in (("base", None, 0), ("midpoint8", "midpoint", 8), ("euler15", "euler", 15)):
        options: dict[str, Any] = {"lad": False, "do_sample": False}
        drawn: list[Any] = []
        if method is not None:
            options = {"lad": True, "do_sample": True, "ode_steps": points, "class_labels": labels}
            drawn = list(torch.tensor(noise(f"dec.{name}.noise", (count, len(prompts), 1, width))))
        with (
            mock.patch.object(torch, "randn", side_effect=drawn),
            mock.patch.object(torch, "multinomial", lambda shares, **_: shares.argmax(-1, keepdim=True)),
            mock.patch.multiple(model.model, ode_kwargs={"method": method}),
            mock.patch.multiple(model, nstep_inference=tolerant),
            torch.no_grad(),
        ):
            asked = [list(prompt) for prompt in prompts]
            endless = SimpleNamespace(pad_token_id=pad, eos_token_id=-1)  # no token ends an answer
            result = decode(model, endless, asked, max_new_tokens=count, **options)
        outputs[name] = result["output_id_seqs"]
    guidance = model.model.nstep_guidance_parameter if labels is not None else None
    described = {"prompts": prompts, "max_new_tokens": count, "class_labels": labels, "guidance_parameter": guidance}
    return described | {"outputs": outputs, "note": "noise [step, B, 1, d] before sigma"}


@contextmanager
def _watched(release: Release, model: Any, family: str) -> Iterator[Mapping[str, list[Any]]]:
    """Notes times of the velocity; arg max, temperature, margin of the network; drawn tokens. Ends a run too long."""
    module, inner, torch = release.module(family), model.model, release.torch
    seen: dict[str, list[Any]] = defaultdict(list)
    integrate, draw, read = module.odeint, torch.multinomial, inner.get_weighted_flow_representation_for_logits

    def odeint(velocity: Callable[..., Any], x: Any, grid: Any, **options: Any) -> Any:
        def noted(t: Any, x: Any) -> Any:
            seen["times"].append(float(t))
            if len(seen["times"]) > MOST_EVALUATIONS:
                raise RuntimeError(f"more than {MOST_EVALUATIONS} evaluations, at t = {float(t)}")
            return velocity(t, x)

        return integrate(noted, x, grid, **options)

    def target(*, logits: Any, temperature: Any, **options: Any) -> Any:
        best = logits.topk(2, dim=-1).values
        seen["margins"].append(float((best[..., 0] - best[..., 1]).min()))
        seen["argmax"].append(logits.argmax(-1).numpy().astype(np.int32))
        seen["temps"].append(float(temperature))
        return read(logits=logits, temperature=temperature, **options)

    def multinomial(probabilities: Any, **options: Any) -> Any:
        drawn = draw(probabilities, **options)
        seen["samples"].append(drawn.view(-1).numpy().astype(np.int32))
        return drawn

    with (
        mock.patch.multiple(module, odeint=odeint),
        mock.patch.multiple(inner, get_weighted_flow_representation_for_logits=target),
        mock.patch.multiple(torch, multinomial=multinomial),
    ):
        yield seen
