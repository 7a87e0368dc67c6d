"""The diffusion path of a language model, in PyTorch: the modules that are trained, and the ODE that they are for.

The path's layers are copies of the language model's own modules. They share everything with it except for the matrices
that the path updates or replaces, and so do whatever the layers of its family do.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_l2d import PathOptions

END = 1e-6  # closer to t = 1 than this, the velocity counts as zero


class Affine(nn.Linear):
    """An affine map in the type of its input; the weights stay in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.float32)
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The map of the last axis."""
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
        self.a = nn.Parameter(torch.randn(rank, linear.in_features, dtype=torch.float32) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=torch.float32))
        self.scale = options.lora_alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the product with the matrix."""
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


def _copied(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(torch.float32, copy=True))


class Projection(nn.Module):
    """A matrix of the language model as the path has it: with an update, or a copy in its place."""

    def __init__(self, linear: nn.Module, changes: PathLayer, name: str) -> None:
        super().__init__()
        self.linear, self.changes, self.name = linear, changes, name

    def forward(self, x: Tensor) -> Tensor:
        """The product, with the bias of the copy or else of the language model."""
        change = getattr(self.changes, self.name)
        if isinstance(change, LowRank):
            return self.linear(x) + change(x)
        bias = self.changes.q_bias if self.name == "q" else self.linear.bias
        return F.linear(x, change.to(x.dtype), None if bias is None else bias.to(x.dtype))


def twin(module: nn.Module, **parts: nn.Module) -> Any:
    """A copy of a module that shares everything with it but some of its parts."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **parts}
    return twin


def with_path(layer: nn.Module, changes: PathLayer) -> Any:
    """A decoder layer of the language model with the path's matrices."""

    def changed(module: nn.Module, names: str) -> Any:
        matrices = {name: f"{name}_proj" for name in names.split() if hasattr(changes, name)}
        return twin(module, **{of: Projection(getattr(module, of), changes, name) for name, of in matrices.items()})

    return twin(layer, self_attn=changed(layer.self_attn, "q k v o"), mlp=changed(layer.mlp, "gate up down"))


@dataclass
class Reading:
    """What the path needs of the main path's run over some tokens."""

    hidden: Tensor  # [B, M, D], before the final norm
    inputs: Tensor  # [B, M, D], what the first layer was given
    calls: list[dict[str, Any]]  # by layer: with what its attention was called
    states: list[tuple[Tensor, Tensor]]  # by layer: the keys and values that it attended to

    def last(self) -> "Reading":
        """The last position alone."""

        def cut(name: str, value: Any) -> Any:
            if name == "position_embeddings":
                return tuple(part[..., -1:, :] for part in value)
            if name == "attention_mask" and value is not None and value.ndim == 4:
                return value[:, :, -1:]
            return value[:, -1:] if name == "position_ids" and value is not None else value

        calls = [{name: cut(name, value) for name, value in call.items()} for call in self.calls]
        return Reading(self.hidden[:, -1:], self.inputs[:, -1:], calls, self.states)


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
        for weight in (self.time.first.weight, self.time.last.weight, self.classes):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)
        silent = [self.merge, *(layer.modulation for layer in self.layers)]  # so that nothing is corrected yet
        for mlp in [*silent, self.translation] if self.anchored else silent:
            nn.init.zeros_(mlp.last.weight)

    def embed(self, embeddings: Tensor) -> Tensor:
        """Vocabulary vectors V_y, of length sqrt(C), of rows of the language model's embedding table, in float32."""
        v = self.vocabulary(embeddings.float())
        squares = v.square().sum(-1, keepdim=True)
        return v * (v.shape[-1] ** 0.5 / torch.where(squares > 0, squares, 1.0).sqrt())

    def condition(self, t: Tensor, classes: Tensor | None) -> Tensor:
        """The embedding of time and class, in float32; None is the null class."""
        half = self.options.frequency_width // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=t.device) / half)
        angle = t[..., None] * self.options.time_scale * frequency
        embedded = self.time(torch.cat([angle.cos(), angle.sin()], dim=-1))
        if self.classes is None:
            return embedded
        return embedded + self.classes[self.options.classes if classes is None else classes]

    def forward(self, x: Tensor, t: Tensor, classes: Tensor | None, reading: Reading, layers: nn.ModuleList) -> Tensor:
        """The correction of the hidden states: w_d(t) f_d, or (1 + w_d(t)) (f_d - h) of an anchored path.

        Diffusion tokens x [B, M, C] are in float32, and t and the classes are of shape [B, M] or broadcast to it; the
        layers are the language model's with the path's matrices.
        """
        dtype = reading.hidden.dtype
        condition = self.condition(t, classes)
        weight = self.merge(condition) - self.merge(self.condition(torch.zeros_like(t), classes))
        weight = torch.where(t[..., None] == 0, 0.0, weight) + float(self.anchored)
        deviation = (((1 - t) * self.options.sigma).square() + t.square()).sqrt()[..., None]
        y = self.translation(x / deviation).to(dtype)
        y = reading.inputs + y if self.anchored else y
        for changes, layer, call, states in zip(self.layers, layers, reading.calls, reading.states, strict=True):
            six = changes.modulation(condition.to(dtype)).chunk(6, dim=-1)
            scale_1, shift_1, gate_1, scale_2, shift_2, gate_2 = six
            if self.anchored:
                gate_1, gate_2 = 1 + gate_1, 1 + gate_2
            before, after_attention, after_mlp = layer.post_attention_layernorm, nn.Identity(), nn.Identity()
            if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma's layers norm what they add, too
                before, after_attention = layer.pre_feedforward_layernorm, layer.post_attention_layernorm
                after_mlp = layer.post_feedforward_layernorm
            normed = _modulated(layer.input_layernorm, y, scale_1) + shift_1
            cache = SimpleNamespace(update=lambda *_, states=states: states)  # in which the keys are already
            added, _ = layer.self_attn(**call, hidden_states=normed, past_key_values=cache)
            y = y + gate_1 * after_attention(added)
            y = y + gate_2 * after_mlp(layer.mlp(_modulated(before, y, scale_2) + shift_2))
        return weight.to(dtype) * (y - reading.hidden if self.anchored else y)


def _modulated(norm: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """The norm of x with a weight that differs from position to position by `scale`."""
    return torch.func.functional_call(norm, {"weight": norm.weight.to(x.dtype) + scale}, (x,))


class Tableau(NamedTuple):
    """An explicit Runge-Kutta method on a uniform grid."""

    nodes: tuple[float, ...]  # of the stages, in intervals
    rows: tuple[tuple[float, ...], ...]  # what each stage takes of the slopes before it
    weights: tuple[float, ...]
    lookahead: float  # intervals beyond t at which an annealed temperature is read
    restarts: bool = False  # whether each estimate replaces the former ones: x is on the line from x_0 to the newest

    def steps(self, budget: int) -> int:
        """The intervals that spend a budget of evaluations, one of which is for the answer; raises `ValueError`."""
        stages = len(self.weights)
        steps, rest = divmod(budget - 1, stages)
        if budget < 1 or rest:
            near = max(1, 1 + stages * steps)
            raise ValueError(
                f"this solver spends 1 + {stages} n evaluations, not {budget}: try {near} or {near + stages}"
            )
        return steps


SOLVERS = {
    "euler": Tableau((0,), ((),), (1,), 1),
    "midpoint": Tableau((0, 1 / 2), ((), (1 / 2,)), (0, 1), 1 / 2),
    "heun": Tableau((0, 1), ((), (1,)), (1 / 2, 1 / 2), 1),
    "heun3": Tableau((0, 1 / 3, 2 / 3), ((), (1 / 3,), (0, 2 / 3)), (1 / 4, 0, 3 / 4), 1),
    "rk4": Tableau(  # the 3/8 rule
        (0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8), 1
    ),
    "restart": Tableau((0,), ((),), (1,), 1, restarts=True),
}


def trajectory(target: Callable[..., Tensor], noise: Tensor, tableau: Tableau, steps: int) -> Iterator[Tensor]:
    """x at every point of a uniform grid, by dx/dt = (target(t, x) - x) / (1 - t) from x_0, which is the noise.

    The equation is linear in x = a x_0 + y. The coefficient a and y are integrated apart: y is of order one where x_0
    is of order sigma, and float32 keeps more of it.
    """
    scale, data = 1.0, torch.zeros_like(noise)
    yield noise
    for step in range(steps):
        slopes: list[tuple[float, Tensor]] = []
        for node, row in zip((*tableau.nodes, 1), (*tableau.rows, tableau.weights), strict=True):
            a = scale + sum(weight * slope for weight, (slope, _) in zip(row, slopes, strict=True))
            y = data + sum(weight * slope for weight, (_, slope) in zip(row, slopes, strict=True))
            if len(slopes) < len(tableau.weights):
                t = (step + node) / steps
                rate = 1 / steps / (1 - t) if 1 - t > END else 0.0
                estimate = target(t, a * noise + y)
                slopes.append((-a * rate, (estimate - y) * rate))
        scale, data = a, (1 - a) * estimate if tableau.restarts else y
        yield scale * noise + data
