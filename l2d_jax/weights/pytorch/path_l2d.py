"""The diffusion path of a language model, in PyTorch: its trained modules, and the language model's layers with them.

These layers are copies of the language model's modules. They share everything with it except the matrices that the path
updates or replaces, so they behave like the layers of its family. A matrix of the language model is looked up whenever
it is used, so an adapter in its place, such as PEFT's, takes effect.
"""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .configuration_l2d import PathOptions
from .reading_l2d import Kept, Reading, twin


class Affine(nn.Linear):
    """An affine map in the dtype of its input; the weights stay in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Set initial values; transformers also calls this, because it creates modules without values."""
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to the last axis."""
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Mlp(nn.Sequential):
    """Two affine maps with a SiLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__(OrderedDict(first=Affine(inputs, hidden), silu=nn.SiLU(), last=Affine(hidden, outputs)))


class LowRank(nn.Module):
    """An update of a matrix by a product of two, A [r, in] and B [out, r]."""

    def __init__(self, linear: nn.Linear, options: PathOptions) -> None:
        super().__init__()
        rank = options.lora_rank
        self.a = nn.Parameter(torch.empty(rank, linear.in_features, dtype=torch.float32))
        self.b = nn.Parameter(torch.empty(linear.out_features, rank, dtype=torch.float32))
        self.scale = options.lora_alpha / rank
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set initial values, with which the update is zero."""
        nn.init.normal_(self.a, std=1 / self.a.shape[0])
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        """The term that is added to the product with the matrix."""
        return F.linear(F.linear(x, self.a.to(x.dtype)), (self.scale * self.b).to(x.dtype))


class PathLayer(nn.Module):
    """The trainable weights of one layer: `modulation`, and an update or a copy of each matrix under its letter."""

    def __init__(self, layer: nn.Module, width: int, options: PathOptions) -> None:
        super().__init__()
        self.modulation = Mlp(options.condition_width, options.condition_width, 6 * width)
        self.q_bias = None
        for name in ("q", "o", "gate", "up", "down") + (("k", "v") if options.reader == "path" else ()):
            linear = getattr(layer.self_attn if name in "qkvo" else layer.mlp, f"{name}_proj")
            is_copy = options.layers == "dense"
            setattr(self, name, _copied(linear.weight) if is_copy else LowRank(linear, options))
            if name == "q" and is_copy and linear.bias is not None:
                self.q_bias = _copied(linear.bias)

    def copy_from(self, layer: nn.Module) -> None:
        """Copy initial values from the language model's layer; transformers creates copies without values."""
        for name, copied in self.named_parameters(recurse=False):
            letter, _, kind = name.partition("_")
            linear = getattr(layer.self_attn if letter in "qkvo" else layer.mlp, f"{letter}_proj")
            init.copy_(copied, getattr(linear, kind or "weight"))


def _copied(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(torch.float32, copy=True))


class Projection(nn.Module):
    """A matrix of the language model as the path uses it: with an update, or replaced by a copy."""

    def __init__(self, owner: nn.Module, name: str, changes: PathLayer) -> None:
        super().__init__()
        self.owner = (owner,)  # in a tuple, because a submodule would contain itself
        self.name, self.changes = name, changes

    def forward(self, x: Tensor) -> Tensor:
        """The product, with the bias of the copy, or else of the language model."""
        linear = getattr(self.owner[0], f"{self.name}_proj")
        change = getattr(self.changes, self.name)
        if isinstance(change, LowRank):
            return linear(x) + change(x)
        bias = self.changes.q_bias if self.name == "q" else linear.bias
        return F.linear(x, change.to(x.dtype), None if bias is None else bias.to(x.dtype))


def with_path(layer: nn.Module, changes: PathLayer) -> Any:
    """A decoder layer of the language model with the path's matrices."""

    def changed(module: nn.Module, names: str) -> Any:
        matrices = [name for name in names.split() if hasattr(changes, name)]
        return twin(module, **{f"{name}_proj": Projection(module, name, changes) for name in matrices})

    return twin(layer, self_attn=changed(layer.self_attn, "q k v o"), mlp=changed(layer.mlp, "gate up down"))


class DiffusionPath(nn.Module):
    """f_d and w_d of the paper, with the maps into and out of the diffusion space."""

    def __init__(self, options: PathOptions, layers: nn.ModuleList, width: int) -> None:
        super().__init__()
        c, e = options.width, options.condition_width
        self.options, self.anchored = options, options.start == "anchored"
        self.vocabulary = Affine(width, c)
        self.translation = Mlp(c, options.translation_width, width)
        self.time = Mlp(options.frequency_width, e, e)
        self.merge = Mlp(e, e, width)
        self.layers = nn.ModuleList(PathLayer(layer, width, options) for layer in layers)
        count = options.classes + 1  # the last is the null class
        self.classes = nn.Parameter(torch.empty(count, e, dtype=torch.float32)) if options.classes else None
        self.gradient_checkpointing = False  # whether a backward pass computes the layers again
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set initial values of a new path that differ from those of its parts."""
        for weight in (self.time.first.weight, self.time.last.weight, self.classes):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)
        silent = [self.merge, *(layer.modulation for layer in self.layers)]  # an untrained path corrects nothing
        for mlp in [*silent, self.translation] if self.anchored else silent:
            nn.init.zeros_(mlp.last.weight)

    def embed(self, embeddings: Tensor) -> Tensor:
        """Vocabulary vectors V_y, with length sqrt(C), for rows of the embedding table, in float32."""
        v = self.vocabulary(embeddings.float())
        squares = v.square().sum(-1, keepdim=True)
        return v * (v.shape[-1] ** 0.5 / torch.where(squares > 0, squares, 1.0).sqrt())

    def condition(self, t: Tensor, classes: Tensor | None) -> Tensor:
        """The embedding of time and class, in float32; `classes` None: the null class."""
        half = self.options.frequency_width // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=t.device) / half)
        angle = t[..., None] * self.options.time_scale * frequency
        embedded = self.time(torch.cat([angle.cos(), angle.sin()], dim=-1))
        if self.classes is None:
            return embedded
        return embedded + self.classes[self.options.classes if classes is None else classes]

    def forward(self, x: Tensor, t: Tensor, classes: Tensor | None, reading: Reading, layers: nn.ModuleList) -> Tensor:
        """The correction of the hidden states: w_d(t) f_d, or (1 + w_d(t)) (f_d - h) for an anchored path.

        Diffusion tokens x [B, M, C] are in float32. t and classes have shape [B, M], or broadcast to it. `layers` are
        the language model's layers with the path's matrices.
        """
        dtype = reading.hidden.dtype
        condition = self.condition(t, classes)
        weight = self.merge(condition) - self.merge(self.condition(torch.zeros_like(t), classes))
        weight = torch.where(t[..., None] == 0, 0.0, weight) + float(self.anchored)
        deviation = (((1 - t) * self.options.sigma).square() + t.square()).sqrt()[..., None]
        y = self.translation(x / deviation).to(dtype)
        y = reading.inputs + y if self.anchored else y
        for changes, layer, call, states in zip(self.layers, layers, reading.calls, reading.states, strict=True):
            run = partial(self._layer, changes, layer, call)
            if self.gradient_checkpointing and self.training:
                run = partial(self._gradient_checkpointing_func, run)
            y = run(y, condition.to(dtype), *states)
        return weight.to(dtype) * (y - reading.hidden if self.anchored else y)

    def _layer(
        self,
        changes: PathLayer,
        layer: Any,
        call: dict[str, Any],
        y: Tensor,
        condition: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Run one layer of the language model with the path's matrices and modulation; it reads keys and values."""
        six = changes.modulation(condition).chunk(6, dim=-1)
        scale_1, shift_1, gate_1, scale_2, shift_2, gate_2 = six
        if self.anchored:
            gate_1, gate_2 = 1 + gate_1, 1 + gate_2
        before, after_attention, after_mlp = layer.post_attention_layernorm, None, None
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma's layers also normalise their outputs
            before, after_attention = layer.pre_feedforward_layernorm, layer.post_attention_layernorm
            after_mlp = layer.post_feedforward_layernorm
        normed = _modulated(layer.input_layernorm, y, scale_1) + shift_1
        added, _ = layer.self_attn(**call, hidden_states=normed, past_key_values=Kept(keys, values))
        y = y + gate_1 * (added if after_attention is None else after_attention(added))
        added = layer.mlp(_modulated(before, y, scale_2) + shift_2)
        return y + gate_2 * (added if after_mlp is None else after_mlp(added))


def _modulated(norm: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """Normalise x with a weight to which `scale` is added, which differs between positions."""
    return torch.func.functional_call(norm, {"weight": norm.weight.to(x.dtype) + scale}, (x,))
