"""What the path reads of the model that it follows: hidden states, keys and values, and how its attention was called.

The decoder's own code runs, with layers that keep a record of each call.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

HOOKED = "_output_capturing_hooks_installed"  # whether a decoder's modules hand over hidden states and attention


def twin(module: nn.Module, **parts: nn.Module) -> Any:
    """A copy of a module that shares everything with it but some of its parts, and its hooks."""
    twin = copy.copy(module)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's, which would run the module itself
        vars(twin).pop(name, None)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        for kind in ("", "_with_kwargs"):
            setattr(twin, name + kind, OrderedDict())
    twin._modules = {**module._modules, **parts}
    return twin


@dataclass
class LayerRun:
    """One layer's run over some tokens."""

    inputs: Tensor  # [B, T, D]
    outputs: Tensor  # [B, T, D]
    call: dict[str, Any]  # with what its attention was called
    states: tuple[Tensor, Tensor]  # the keys and values that it attended to


class Keeping:
    """A cache, for one layer's attention, that keeps what its update has returned."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the attention uses."""
        self.states = self.cache.update(*given, **options)
        return self.states


class Kept(NamedTuple):
    """A cache, for one layer's attention, that has all keys and values already."""

    keys: Tensor
    values: Tensor

    def update(self, *_: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the attention uses."""
        return self.keys, self.values


class Recorded(nn.Module):
    """A decoder layer that adds each run to the list that it is called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *, past_key_values: Any, runs: list[LayerRun], **call: Any) -> Tensor:
        """The layer's output."""
        cache = Keeping(past_key_values)
        outputs = self.layer(hidden, past_key_values=cache, **call)
        runs.append(LayerRun(hidden, outputs, call, cache.states))
        return outputs


@dataclass
class Reading:
    """What the path needs of the main path's run over some tokens."""

    hidden: Tensor  # [B, M, D], before the final norm
    inputs: Tensor  # [B, M, D], what the first layer was given
    calls: list[dict[str, Any]]  # by layer: with what its attention was called
    states: list[tuple[Tensor, Tensor]]  # by layer: the keys and values that it attended to
    seen: int  # tokens in the cache
    attention: str  # transformers' name of the implementation

    def last(self, count: int) -> "Reading":
        """The last positions alone; 0: all of them."""
        length = self.hidden.shape[1]
        if count == 0 or count >= length:
            return self
        calls, states = [], []
        for call, (keys, values) in zip(self.calls, self.states, strict=True):
            cut = {name: _cut(name, value, count) for name, value in call.items()}
            if call.get("attention_mask") is None:  # each token sees all before it, but no slots that are empty
                keys, values = keys[:, :, : self.seen], values[:, :, : self.seen]
                if count > 1 and "flash" not in self.attention:  # which counts from the end
                    ones = torch.ones(count, keys.shape[2], dtype=torch.bool, device=keys.device)
                    cut["attention_mask"] = ones.tril(keys.shape[2] - count)[None, None]
            calls.append(cut)
            states.append((keys, values))
        return replace(self, hidden=self.hidden[:, -count:], inputs=self.inputs[:, -count:], calls=calls, states=states)


def _cut(name: str, value: Any, count: int) -> Any:
    """An argument of attention for the last positions."""
    if name == "position_embeddings":
        return tuple(part[..., -count:, :] for part in value)
    if name == "attention_mask" and value is not None and value.ndim == 4:
        return value[:, :, -count:]
    return value[:, -count:] if name == "position_ids" and value is not None else value


class Reader:
    """The model that reads the context: a decoder's own code, with some layers, each of which is recorded."""

    def __init__(self, decoder: Any, layers: nn.ModuleList) -> None:
        self.decoder = twin(decoder, layers=nn.ModuleList(map(Recorded, layers)))
        self.twins = [decoder, self.decoder] if layers is decoder.layers else [self.decoder]
        setattr(self.decoder, HOOKED, getattr(self.twins[0], HOOKED, False) and len(self.twins) > 1)

    def __call__(self, past_key_values: Any, **inputs: Any) -> tuple[Reading, Any, Any]:
        """Run over embeddings, [B, T, D]; what the path needs, the cache, and what the decoder returned."""
        cache = DynamicCache(config=self.decoder.config) if past_key_values is None else past_key_values
        runs: list[LayerRun] = []
        self._share_hooks()
        outputs = self.decoder(past_key_values=cache, use_cache=True, runs=runs, **inputs)
        self._share_hooks()
        calls, states = [run.call for run in runs], [run.states for run in runs]
        seen, attention = cache.get_seq_length(), self.decoder.config._attn_implementation
        return Reading(runs[-1].outputs, runs[0].inputs, calls, states, seen, attention), cache, outputs

    def _share_hooks(self) -> None:
        """Decoders that have the same layers do not install transformers' hooks twice."""
        if not torch.compiler.is_compiling() and any(getattr(one, HOOKED, False) for one in self.twins):
            for one in self.twins:
                setattr(one, HOOKED, True)
