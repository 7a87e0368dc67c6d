"""What the path reads from its language model: hidden states, keys and values, and the arguments of attention.

The decoder runs unchanged, with layers that record each call.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

HOOKED = "_output_capturing_hooks_installed"  # set if a decoder's modules have hooks for hidden states and attention


def twin(module: nn.Module, **parts: nn.Module) -> Any:
    """A copy of a module that shares everything with it except `parts` and its hooks."""
    twin = copy.copy(module)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's hooks would run the original module
        vars(twin).pop(name, None)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        for kind in ("", "_with_kwargs"):
            setattr(twin, name + kind, OrderedDict())
    twin._modules = {**module._modules, **parts}
    return twin


@dataclass
class LayerRun:
    """A run of one layer over some tokens."""

    inputs: Tensor  # [B, T, D]
    outputs: Tensor  # [B, T, D]
    call: dict[str, Any]  # arguments of its attention
    states: tuple[Tensor, Tensor]  # the keys and values that it attended to


class Keeping:
    """A cache for one layer's attention that records what its update returns."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the attention uses."""
        self.states = self.cache.update(*given, **options)
        return self.states


class Kept(NamedTuple):
    """A cache for one layer's attention that already has all keys and values."""

    keys: Tensor
    values: Tensor

    def update(self, *_: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the attention uses."""
        return self.keys, self.values


class Recorded(nn.Module):
    """A decoder layer that appends each run to the list `runs`."""

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
    """What the path needs from the language model's run over some tokens."""

    hidden: Tensor  # [B, M, D], before the final norm
    inputs: Tensor  # [B, M, D], inputs of the first layer
    calls: list[dict[str, Any]]  # per layer: arguments of its attention
    states: list[tuple[Tensor, Tensor]]  # per layer: the keys and values that it attended to
    seen: int  # number of tokens in the cache
    attention: str  # transformers' name of the implementation

    def last(self, count: int) -> "Reading":
        """Only the last `count` positions; 0: all."""
        length = self.hidden.shape[1]
        if count == 0 or count >= length:
            return self
        calls, states = [], []
        for call, (keys, values) in zip(self.calls, self.states, strict=True):
            cut = {name: _cut(name, value, count) for name, value in call.items()}
            if call.get("attention_mask") is None:  # each token sees all tokens before it; no slot is empty
                keys, values = keys[:, :, : self.seen], values[:, :, : self.seen]
                if count > 1 and "flash" not in self.attention:  # flash attention aligns queries at the end
                    ones = torch.ones(count, keys.shape[2], dtype=torch.bool, device=keys.device)
                    cut["attention_mask"] = ones.tril(keys.shape[2] - count)[None, None]
            calls.append(cut)
            states.append((keys, values))
        return replace(self, hidden=self.hidden[:, -count:], inputs=self.inputs[:, -count:], calls=calls, states=states)


def _cut(name: str, value: Any, count: int) -> Any:
    """Cut an argument of attention to the last positions."""
    if name == "position_embeddings":
        return tuple(part[..., -count:, :] for part in value)
    if name == "attention_mask" and value is not None and value.ndim == 4:
        return value[:, :, -count:]
    return value[:, -count:] if name == "position_ids" and value is not None else value


class Reader:
    """The model that reads the context: a decoder with the given layers, whose runs are recorded."""

    def __init__(self, decoder: Any, layers: nn.ModuleList) -> None:
        self.decoder = twin(decoder, layers=nn.ModuleList(map(Recorded, layers)))
        self.twins = [decoder, self.decoder] if layers is decoder.layers else [self.decoder]
        setattr(self.decoder, HOOKED, getattr(self.twins[0], HOOKED, False) and len(self.twins) > 1)

    def __call__(self, past_key_values: Any, **inputs: Any) -> tuple[Reading, Any, Any]:
        """Run over embeddings, [B, T, D]; returns what the path needs, the cache, and the decoder's output."""
        cache = DynamicCache(config=self.decoder.config) if past_key_values is None else past_key_values
        runs: list[LayerRun] = []
        self._share_hooks()
        outputs = self.decoder(past_key_values=cache, use_cache=True, runs=runs, **inputs)
        self._share_hooks()
        calls, states = [run.call for run in runs], [run.states for run in runs]
        seen, attention = cache.get_seq_length(), self.decoder.config._attn_implementation
        return Reading(runs[-1].outputs, runs[0].inputs, calls, states, seen, attention), cache, outputs

    def _share_hooks(self) -> None:
        """Prevent decoders with the same layers from installing transformers' hooks twice."""
        if not torch.compiler.is_compiling() and any(getattr(one, HOOKED, False) for one in self.twins):
            for one in self.twins:
                setattr(one, HOOKED, True)
