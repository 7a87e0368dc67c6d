"""A language model that thinks longer by diffusion ("Large Language Models to Diffusion Finetuning"), in PyTorch.

The language model is frozen, and is one of transformers' own. A diffusion path reads its keys and values, moves a noisy
token x_t from t = 0 to t = 1 along an ODE, and corrects the last hidden state, from which the model's own head predicts
the next token. The more evaluations of the path a token gets, its budget, the better; one is the language model alone.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**tokenizer("2 + 2 =", return_tensors="pt"), budget=15, solver="midpoint", max_new_tokens=20)

Shapes: B batch, T tokens, M positions of diffusion tokens, D model width, C diffusion width, V vocabulary.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file

from .configuration_l2d import CODE, L2DConfig, PathOptions
from .path_l2d import SOLVERS, DiffusionPath, Reading, trajectory, twin, with_path

WEIGHTS = "model.safetensors"  # of the path alone
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def draw(shape: Sequence[int], method: Callable[..., Tensor], like: Tensor, generator: Any) -> Tensor:
    """Random numbers by a method of tensors, from one generator for the batch or from one for each row."""
    if not isinstance(generator, list | tuple):
        return method(torch.empty(shape, device=like.device), generator=generator)
    if len(generator) != shape[0]:
        raise ValueError(f"give one generator, or one for each of {shape[0]} rows, got {len(generator)}")
    return torch.cat([method(torch.empty((1, *shape[1:]), device=like.device), generator=row) for row in generator])


class L2DForCausalLM(PreTrainedModel, GenerationMixin):
    """The frozen language model `lm` and its `path`, for transformers' `generate`, and for training the path."""

    config_class = L2DConfig
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
    accepts_loss_kwargs = False  # the loss is a mean over examples, whatever else is in a step

    def __init__(self, config: L2DConfig, lm: PreTrainedModel | None = None) -> None:
        """Put a new path beside a language model; without one, beside random weights of its shape."""
        super().__init__(config)
        self.lm = AutoModelForCausalLM.from_config(config.text_config) if lm is None else lm
        self.lm.requires_grad_(False).eval()
        config.text_config = self.lm.config
        decoder = self.lm.get_decoder()
        self.options = PathOptions(**config.path)
        self.path = DiffusionPath(self.options, decoder.layers, decoder.config.hidden_size).to(self.lm.device)
        # Not a submodule: its weights are those of the two others.
        layers = nn.ModuleList(map(with_path, decoder.layers, self.path.layers))
        self._twins = (twin(decoder, layers=layers),)
        self._table: tuple[Any, Tensor] | None = None
        self.post_init()
        self.generation_config = self.lm.generation_config

    def init_weights(self) -> None:
        """Nothing: the path's modules begin at the paper's initial values, and the language model is as it is."""

    def train(self, mode: bool = True) -> "L2DForCausalLM":
        """Switch the path to training; the language model stays as it decodes."""
        super().train(mode)
        self.lm.eval()
        return self

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], *_: Any, config: Any = None, **options: Any) -> Any:
        """Load the path in a folder or repository, and the language model that its config names.

        Options of the hub are about the path; others, such as `dtype`, `device_map` and `attn_implementation`, are for
        the language model, whose own code is never run. Raises `ValueError` for tensors that do not fit it.
        """
        hub = {option: options.pop(option) for option in HUB_OPTIONS if option in options}
        for ours in ("trust_remote_code", "adapter_kwargs", "_from_auto", "code_revision"):
            options.pop(ours, None)
        config = L2DConfig.from_pretrained(name, **hub) if config is None else config
        options.setdefault("attn_implementation", config._attn_implementation)
        base, nearby = config.base_model_name_or_path, os.path.join(name, config.base_model_name_or_path)
        base = nearby if os.path.isdir(nearby) else base
        where = {option: hub[option] for option in ("cache_dir", "local_files_only", "token") if option in hub}
        lm = AutoModelForCausalLM.from_pretrained(
            base, revision=config.base_revision or "main", trust_remote_code=False, **where, **options
        )
        model = cls(config, lm)
        tensors = load_file(cached_file(name, WEIGHTS, **hub))
        try:
            model.path.load_state_dict({name.removeprefix("path."): tensor for name, tensor in tensors.items()})
        except RuntimeError as error:  # which names what is missing, unknown or misshaped
            raise ValueError(f"the path in {name} does not fit its config or {base}: {error}") from None
        ends = lm.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        model.generation_config.eos_token_id = list(dict.fromkeys([*ends, *(config.stop_ids or [])])) or None
        return model.eval()

    def save_pretrained(self, folder: str | os.PathLike[str], **_: Any) -> None:
        """Write the path, its config and this code: not the language model."""
        os.makedirs(folder, exist_ok=True)
        tensors = {f"path.{name}": tensor.contiguous() for name, tensor in self.path.state_dict().items()}
        save_file(tensors, os.path.join(folder, WEIGHTS), metadata={"format": "pt"})
        self.config.architectures, self.config.auto_map = [type(self).__name__], dict(CODE)
        self.config.save_pretrained(folder)
        for file in Path(__file__).parent.glob("*_l2d.py"):
            if file.parent.resolve() != Path(folder).resolve():
                shutil.copyfile(file, Path(folder, file.name))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        budget: int | None = None,
        solver: str | None = None,
        velocity: str = "sample",
        velocity_temperature: float = 0.0,
        anneal: bool = False,
        guidance: float = 1.0,
        class_labels: Tensor | None = None,
        noise: Any = None,
        generator: Any = None,
        t: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the tokens that follow or, with `labels`, the path's training loss; raises `ValueError`.

        Args:
          input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep, options: as elsewhere.
          labels: the tokens, [B, T], with -100 where there is no loss.
          budget: evaluations of the path per token, the final one included; 1: the language model alone.
          solver: "euler", "midpoint", "heun", "heun3", "rk4" or "restart".
          velocity: x_1 is estimated by the vector of one token, "sample", or by the mean over all, "expectation".
          velocity_temperature: of that token or mean; 0: arg max.
          anneal: whether that temperature falls linearly to 0 as t goes to 1.
          guidance: the strength of the class; 1: the class alone, 0: the null class.
          class_labels: a class for each row, [B], or in training for each position, too; None: the null class.
          noise: x_0 of unit variance, [B, M, C], or a function that makes it of this shape; None: random.
          generator: for random numbers; one for each row makes a row's answer independent of the others.
          t: times of the training loss, [B, T - 1]; None: uniform.
        """
        if velocity not in ("sample", "expectation"):
            raise ValueError(f'velocity must be "sample" or "expectation", got {velocity!r}')
        solver = self.config.solver if solver is None else solver
        if solver not in SOLVERS:
            raise ValueError(f"unknown solver {solver!r}: choose from {', '.join(SOLVERS)}")
        classes = self._checked(class_labels)
        context = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if labels is not None:
            context = {name: None if value is None else value[:, :-1] for name, value in context.items()}
            loss = self._loss(self.read(**context)[0], labels[:, 1:], t, classes, noise, generator)
            return CausalLMOutputWithPast(loss=loss)
        context |= {"past_key_values": past_key_values, **options}
        tableau = SOLVERS[solver]
        steps = tableau.steps(self.config.budget if budget is None else budget)
        if not steps:
            return self.lm(**context, use_cache=use_cache, logits_to_keep=logits_to_keep)
        reading, cache = self.read(**context)
        reading = reading.last() if logits_to_keep == 1 else reading
        branches = [classes] if classes is None or guidance == 1 else [classes, None]

        def target(t: float, x: Tensor) -> Tensor:
            temperature = velocity_temperature
            if anneal:
                temperature *= min(max(1 - t - tableau.lookahead / steps, 0.0), 1.0)
            hidden = [self.corrected(x, t, branch, reading) for branch in branches]
            estimates = self._estimates(torch.stack(hidden), temperature, velocity, generator)
            return estimates[0] if len(branches) == 1 else guidance * estimates[0] + (1 - guidance) * estimates[1]

        *_, x = trajectory(target, self._noise(reading.hidden, noise, generator), tableau, steps)
        hidden = self.corrected(x, 1.0, classes, reading)[:, -logits_to_keep:]
        cache = None if use_cache is False else cache
        return CausalLMOutputWithPast(logits=self.logits(hidden), past_key_values=cache)

    def read(self, past_key_values: Any = None, **inputs: Any) -> tuple[Reading, Any]:
        """Run the model that reads the context, and keep what the path needs; the cache holds the tokens, too."""
        is_trained = self.options.reader == "path"
        decoder = self._twins[0] if is_trained else self.lm.get_decoder()
        cache = DynamicCache(config=decoder.config) if past_key_values is None else past_key_values
        ends: list[Tensor] = []
        calls: list[dict[str, Any]] = []
        states: dict[int, tuple[Tensor, Tensor]] = {}
        update = cache.update

        def keep_states(keys: Tensor, values: Tensor, layer: int, *rest: Any, **others: Any) -> tuple[Tensor, Tensor]:
            states[layer] = update(keys, values, layer, *rest, **others)
            return states[layer]

        def keep_call(_: nn.Module, __: Any, call: dict[str, Any]) -> None:
            calls.append({name: call[name] for name in call if name not in ("hidden_states", "past_key_values")})

        hooks = [layer.self_attn.register_forward_pre_hook(keep_call, with_kwargs=True) for layer in decoder.layers]
        parts = (decoder.layers[0], decoder.norm)
        hooks += [part.register_forward_pre_hook(lambda _, args: ends.append(args[0])) for part in parts]
        cache.update = keep_states
        try:
            with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
                decoder(past_key_values=cache, use_cache=True, **inputs)
        finally:
            del cache.update
            for hook in hooks:
                hook.remove()
        first, last = ends
        return Reading(last, first, calls, [states[i] for i in range(len(calls))]), cache

    def corrected(self, x: Tensor, t: Tensor | float, classes: Tensor | None, reading: Reading) -> Tensor:
        """Hidden states [B, M, D] after one evaluation of the path, at one time or at one for each position."""
        times = t if isinstance(t, Tensor) else torch.full((1, 1), t, device=x.device)
        return reading.hidden + self.path(x, times, classes, reading, self._twins[0].layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, in float32."""
        logits = self.lm.get_output_embeddings()(self.lm.get_decoder().norm(hidden)).float()
        cap = getattr(self.config.text_config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _estimates(self, hidden: Tensor, temperature: float, velocity: str, generator: Any) -> Tensor:
        """Estimates of x_1 from hidden states [branches, B, M, D]; all branches sample with the same numbers."""
        logits = self.logits(hidden)
        if velocity == "expectation" and temperature > 0:
            return (logits / max(temperature, 1e-6)).softmax(-1) @ self._vocabulary()
        if temperature > 0:
            exponential = draw(logits.shape[1:], Tensor.exponential_, logits, generator)
            logits = logits - temperature * exponential.log()  # Gumbel noise
        return self.path.embed(F.embedding(logits.argmax(-1), self.lm.get_input_embeddings().weight))

    @torch.no_grad()
    def _vocabulary(self) -> Tensor:
        """The vectors of all tokens, [V, C], computed again only if a weight has changed."""
        table = self.lm.get_input_embeddings().weight
        weights = (table, *self.path.vocabulary.parameters())
        version = [(weight.data_ptr(), weight.is_inference() or weight._version) for weight in weights]
        if self._table is None or self._table[0] != version:
            self._table = version, self.path.embed(table)
        return self._table[1]

    def _checked(self, classes: Tensor | None) -> Tensor | None:
        """Classes of shape [B, 1] or [B, T]; raises `ValueError` for one that the path does not know."""
        count = self.options.classes
        if classes is not None and not (count and ((classes >= 0) & (classes <= count)).all()):
            known = f"0 to {count - 1}, and {count} for none of them" if count else "none: it was trained without"
            raise ValueError(f"the path does not know all of class_labels; it knows {known}")
        return classes if classes is None or classes.ndim == 2 else classes[:, None]

    def _noise(self, like: Tensor, noise: Any, generator: Any) -> Tensor:
        """x_0 for hidden states of shape [B, M, D]: random, or sigma times what is given or made by a function."""
        shape = torch.Size((*like.shape[:2], self.options.width))
        noise = draw(shape, Tensor.normal_, like, generator) if noise is None else noise
        noise = noise(shape) if callable(noise) else noise
        if noise.shape != shape:
            raise ValueError(f"the noise must be of shape {tuple(shape)}, got {tuple(noise.shape)}")
        return self.options.sigma * noise.to(like.device, torch.float32)

    def _loss(self, reading: Reading, targets: Tensor, t: Any, classes: Any, noise: Any, generator: Any) -> Tensor:
        """The mean over examples of their targets' mean cross-entropy, in nats (paper, equation 5)."""
        t = draw(targets.shape, Tensor.uniform_, targets, generator) if t is None else t
        if classes is not None and self.training:
            dropped = draw(targets.shape, Tensor.uniform_, targets, generator) < self.options.class_dropout
            classes = torch.where(dropped, self.options.classes, classes)
        data = self.path.embed(F.embedding(targets.clamp(min=0), self.lm.get_input_embeddings().weight))
        x = t[..., None] * data + (1 - t[..., None]) * self._noise(reading.hidden, noise, generator)
        hidden = self.corrected(x, t, classes, reading)
        shown = targets != -100
        losses = F.cross_entropy(self.logits(hidden[shown]), targets[shown], reduction="none")
        counts = shown.sum(dim=1, keepdim=True).expand_as(shown)
        return (losses / counts[shown]).sum() / shown.any(dim=1).sum().clamp(min=1)
