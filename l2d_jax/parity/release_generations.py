"""Runs the release's own generation on prompts."""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

from l2d_jax.parity.release_model import Release, replaced
from l2d_jax.parity.release_runs import Arrays

MOST_NEW_TOKENS = 6  # of a generation
DECODERS = (  # the release's generation loop, and what it calls
    "autoregressive_decode",
    "step_decode",
    "Trie",
    "temperature_processor",
    "good_token_ids_processor",
    "bad_token_ids_processor",
    "penalty_processor",
    "top_k_processor",
    "top_p_processor",
)


def record_generations(
    release: Release,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    noise: Callable[[str, tuple[int, ...]], Any],
    labels: Sequence[int] | None,
    pad: int,
) -> tuple[Arrays, dict[str, Any]]:
    """Whole answers by the release's own loop, which takes the likeliest token; "base" is the LM alone.

    `noise` makes the unit normal noise of a name and shape.
    """
    torch, transformers = release.torch, release.transformers
    known = {
        "defaultdict": defaultdict,
        "copy": copy,
        "DynamicCache": transformers.DynamicCache,
        "AutoTokenizer": Any,
        "PeftModelForCausalLM": type("PeftModelForCausalLM", (), {}),
    }
    decode = release.functions("pipeline/decoding_util.py", DECODERS, known)["autoregressive_decode"]
    count, width = MOST_NEW_TOKENS, model.model.flow_representation_dim
    arrays, outputs = {}, {}
    for name, method, points in (("base", None, 0), ("midpoint8", "midpoint", 8), ("euler15", "euler", 15)):
        options: dict[str, Any] = {"lad": False, "do_sample": False}
        drawn: list[Any] = []
        if method is not None:
            options = {"lad": True, "do_sample": True, "ode_steps": points, "class_labels": labels}
            array = noise(f"dec.{name}.noise", (count, len(prompts), 1, width))
            arrays[f"dec.{name}.noise"], drawn = array, list(torch.tensor(array))
        taken = iter(drawn)
        with (
            replaced(torch, randn=lambda *_, taken=taken, **__: next(taken), multinomial=_likeliest),
            replaced(model.model, ode_kwargs={"method": method}),
            replaced(model, nstep_inference=_tolerant(model.nstep_inference)),
            torch.no_grad(),
        ):
            result = decode(
                model,
                SimpleNamespace(pad_token_id=pad, eos_token_id=-1),  # no token ends an answer
                [list(prompt) for prompt in prompts],
                max_new_tokens=count,
                **options,
            )
        outputs[name] = result["output_id_seqs"]
    described = {
        "prompts": [list(prompt) for prompt in prompts],
        "max_new_tokens": count,
        "class_labels": labels,
        "guidance_parameter": model.model.nstep_guidance_parameter if labels is not None else None,
        "outputs": outputs,
        "note": "noise [step, B, 1, d] before sigma",
    }
    return arrays, described


def _likeliest(probabilities: Any, **_: Any) -> Any:
    return probabilities.argmax(-1, keepdim=True)


def _tolerant(inference: Callable[..., Any]) -> Callable[..., Any]:
    """The release's Qwen lacks an argument that its loop passes."""
    known = signature(inference).parameters
    return lambda **options: inference(**{name: value for name, value in options.items() if name in known})
