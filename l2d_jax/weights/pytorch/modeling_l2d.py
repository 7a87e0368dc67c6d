"""A language model with a diffusion path ("Large Language Models to Diffusion Finetuning"), in PyTorch.

The language model is frozen, and one of transformers' models. A diffusion path reads its keys and values, moves a noisy
token x_t from t = 0 to t = 1 along an ODE, and corrects the last hidden state, from which the model's head predicts the
next token. The budget is the number of evaluations of the path per token; 1 is the language model alone.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**tokenizer("2 + 2 =", return_tensors="pt"), budget=15, solver="midpoint", max_new_tokens=20)

Shapes: B batch, T tokens, M positions of diffusion tokens, D model width, C diffusion width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .folder_l2d import PathBesideModel
from .noise_l2d import CLASS, TIME, Drawn, Numbered
from .reading_l2d import Reading
from .solver_l2d import Settings, trajectory

SEED = 0  # default seed of the noise
FURTHER = (*TransformersKwargs.__annotations__, "cache_position", "token_type_ids")  # further arguments of a decoder


class L2DForCausalLM(PathBesideModel, GenerationMixin):
    """The frozen language model `lm` and its `path`, for transformers' `generate`, and for training the path."""

    accepts_loss_kwargs = False  # the loss is a mean over examples, independent of other micro-batches

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        budget: int | None = None,
        solver: str | None = None,
        velocity: str = "sample",
        velocity_temperature: float = 0.0,
        anneal: bool = False,
        guidance: float = 1.0,
        class_labels: Tensor | None = None,
        seed: int | Tensor | None = None,
        sequence_ids: Any = None,
        answer_start: int | Tensor = 0,
        noise: Any = None,
        generator: Any = None,
        t: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        return_logits: bool = True,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next tokens; with `labels`, also the path's training loss. Raises `ValueError`.

        The random numbers of a token (noise and sampled velocities) are a function of the seed, the number of its
        sequence, and the number of tokens before it, without padding.

        Args:
          input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, logits_to_keep, options:
            as in transformers. Without position ids, they follow from the mask.
          labels: the tokens, [B, T], with -100 where there is no loss; `shift_labels`: the same, one place earlier.
          budget: evaluations of the path per token, including the final one; 1: the language model alone.
          solver: "euler", "midpoint", "heun", "heun3", "rk4" or "restart".
          velocity: x_1 is estimated by the vector of a sampled token, "sample", or the mean over all, "expectation".
          velocity_temperature: temperature of that token or mean; 0: arg max.
          anneal: whether that temperature falls linearly to 0 as t goes to 1.
          guidance: strength of the class; 1: the class alone, 0: the null class.
          class_labels: a class for each row, [B], or in training also for each position; None: the null class.
          seed: seed of the random numbers; None: 0, or in training PyTorch's generator.
          sequence_ids: a number for each row, [B]; rows with different numbers have different noise. None: all 0.
          answer_start: number of tokens before the one that is numbered 0, [B] or one for all. With the lengths of the
            prompts here and the prompts' numbers as sequence ids, the noise is that of l2d_jax for the same seed.
          noise: x_0 with unit variance, [B, M, C], or a function that makes it from this shape; None: from the seed.
          generator: PyTorch generator instead of a seed; one for all rows, or one per row.
          t: times of the training loss, [B, T - 1]; None: uniform.
          num_items_in_batch: divisor of the sum of token losses; None: mean over examples of token means.
          return_logits: whether to return logits with the loss: [B, T, V], at the times of the loss, and at t = 0
            where there is no label.
        """
        if unknown := set(options) - set(FURTHER):
            raise ValueError(f"unknown option {min(unknown)[:80]!r} of forward")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        budget = self.config.budget if budget is None else budget
        solver = self.config.solver if solver is None else solver
        has_class = class_labels is not None
        settings = Settings(budget, solver, velocity, velocity_temperature, anneal, guidance, has_class)
        classes = self._checked(class_labels)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100) if labels is not None else None
        targets = targets if shift_labels is None else shift_labels
        before = _tokens_before(input_ids, inputs_embeds, attention_mask, position_ids, past_key_values)
        if position_ids is None and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            position_ids = (before - 1).clamp(min=0)
        context = {"attention_mask": attention_mask, "position_ids": position_ids}
        context |= {"past_key_values": past_key_values, **options}
        if not settings.steps and targets is None:
            context |= {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
            return self.lm(**context, use_cache=use_cache, logits_to_keep=logits_to_keep)
        is_seeded = seed is not None or not (self.training and targets is not None)
        numbers = self._numbers(before, seed, sequence_ids, answer_start, generator, is_seeded=is_seeded)
        inputs_embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        reading, cache, outputs = self._read(inputs_embeds, **context)
        if targets is not None:
            hidden = self._at_random_times(reading, targets, t, classes, noise, numbers)
            loss, logits = self._loss(hidden, targets, num_items_in_batch, is_full=return_logits)
            use_cache = bool(use_cache)
        else:
            if isinstance(logits_to_keep, int) and not options.get("output_hidden_states"):
                reading, numbers = reading.last(logits_to_keep), numbers.last(logits_to_keep)
            hidden = self._refined(reading, settings, classes, noise, numbers)
            loss, logits = None, self.logits(slice_logits_to_keep(hidden, logits_to_keep))
        states = outputs.hidden_states
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=None if use_cache is False else cache,
            hidden_states=states and (*states[:-1], self.lm.get_decoder().norm(hidden)),
            attentions=outputs.attentions,
        )

    def read(self, input_ids: Tensor, **inputs: Any) -> tuple[Reading, Any]:
        """Read the context: what the path needs, and the cache."""
        return self._read(self.get_input_embeddings()(input_ids), **inputs)[:2]

    def _read(self, inputs_embeds: Tensor, past_key_values: Any = None, **inputs: Any) -> tuple[Reading, Any, Any]:
        """Run the model that reads the context; with gradients if it contains the path or an adapter."""
        is_trained = torch.is_grad_enabled() and (
            self.options.reader == "path"
            or inputs_embeds.requires_grad
            or any(weight.requires_grad for weight in self.lm.parameters())
        )
        with torch.set_grad_enabled(is_trained):
            return self._reader[0](past_key_values, inputs_embeds=inputs_embeds, **inputs)

    def corrected(self, x: Tensor, t: Tensor | float, classes: Tensor | None, reading: Reading) -> Tensor:
        """Hidden states [B, M, D] after one evaluation of the path; t is shared, or one per position."""
        times = t if isinstance(t, Tensor) else torch.full((1, 1), t, device=x.device)
        return reading.hidden + self.path(x, times, classes, reading, self._layers[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, in float32."""
        logits = self.lm.get_output_embeddings()(self.lm.get_decoder().norm(hidden)).float()
        cap = getattr(self.config.text_config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.compiler.disable(recursive=False)  # so that its callees compile once, not per evaluation
    def _refined(self, reading: Reading, settings: Settings, classes: Any, noise: Any, numbers: Any) -> Tensor:
        """Hidden states after the whole budget; their logits are the answer's."""
        guidance = settings.guidance
        branches = [classes] if classes is None or guidance == 1 else [classes, None]

        @torch.compiler.disable(recursive=False)
        def target(t: float, x: Tensor) -> Tensor:
            time, temperature = torch.full((2, 1, 1), t, device=x.device), settings.temperature(t)
            time[1] = temperature
            hidden = torch.stack([self.corrected(x, time[0], branch, reading) for branch in branches])
            kind = settings.velocity if temperature > 0 else "likeliest"
            estimates = self._estimates(hidden, *time, kind, numbers)
            return estimates[0] if len(branches) == 1 else guidance * estimates[0] + (1 - guidance) * estimates[1]

        *_, x = trajectory(target, self._noise(reading.hidden, noise, numbers), settings)
        return self.corrected(x, torch.ones((1, 1), device=x.device), classes, reading)

    def _numbers(
        self, before: Tensor, seed: Any, sequences: Any, start: Any, generator: Any, *, is_seeded: bool
    ) -> Numbered | Drawn:
        """The random numbers of each position; raises `ValueError` for options that contradict each other."""
        if generator is not None and (seed is not None or sequences is not None):
            raise ValueError("give a generator, or a seed and sequence_ids, not both")
        if generator is not None or not is_seeded:
            return Drawn(generator, before)
        start = torch.as_tensor(start, device=before.device).reshape(-1, 1)
        if len(start) not in (1, len(before)):
            raise ValueError(f"answer_start must be one number, or {len(before)}, one for each row, got {len(start)}")
        return Numbered.of(SEED if seed is None else seed, sequences, before - start)

    def _estimates(self, hidden: Tensor, t: Tensor, temperature: Tensor, kind: str, numbers: Any) -> Tensor:
        """Estimates of x_1 from hidden states [branches, B, M, D]; all branches use the same random numbers."""
        logits = self.logits(hidden)
        if kind == "expectation":
            return (logits / temperature.clamp(min=1e-6)).softmax(-1) @ self._vocabulary()
        if kind == "sample":
            logits = logits + temperature * numbers.gumbel(logits.shape[-1], t)
        return self.path.embed(F.embedding(logits.argmax(-1), self.get_input_embeddings().weight))

    @torch.no_grad()
    def _vocabulary(self) -> Tensor:
        """The vectors of all tokens, [V, C]; recomputed only if a weight has changed."""
        table = self.get_input_embeddings().weight
        if torch.compiler.is_compiling():
            return self.path.embed(table)
        weights = (table, *self.path.vocabulary.parameters())
        version = [(weight.data_ptr(), weight.is_inference() or weight._version) for weight in weights]
        if self._table is None or self._table[0] != version:
            self._table = version, self.path.embed(table)
        return self._table[1]

    def _checked(self, classes: Tensor | None) -> Tensor | None:
        """Classes with shape [B, 1] or [B, T]; raises `ValueError` for an unknown class."""
        count = self.options.classes
        if classes is not None and not (count and ((classes >= 0) & (classes <= count)).all()):
            known = f"0 to {count - 1}, and {count} for none of them" if count else "none: it was trained without"
            raise ValueError(f"the path does not know all of class_labels; it knows {known}")
        return classes if classes is None or classes.ndim == 2 else classes[:, None]

    def _noise(self, like: Tensor, noise: Any, numbers: Any) -> Tensor:
        """x_0 for hidden states of shape [B, M, D]: random, or sigma times the given noise."""
        shape = torch.Size((*like.shape[:2], self.options.width))
        noise = numbers.normal(self.options.width) if noise is None else noise
        noise = noise(shape) if callable(noise) else noise
        if noise.shape != shape:
            raise ValueError(f"the noise must be of shape {tuple(shape)}, got {tuple(noise.shape)}")
        return self.options.sigma * noise.to(like.device, torch.float32)

    def _at_random_times(
        self, reading: Reading, targets: Tensor, t: Any, classes: Any, noise: Any, numbers: Any
    ) -> Tensor:
        """Hidden states for the targets' vectors, mixed with noise at times t; t = 0 where there is no target."""
        shown, length = targets != -100, targets.shape[1]
        t = torch.where(shown, numbers.uniform(TIME) if t is None else F.pad(t, (0, length - t.shape[1])), 0.0)
        if isinstance(noise, Tensor):
            noise = F.pad(noise, (0, 0, 0, length - noise.shape[1]))
        if classes is not None and classes.shape[1] > 1:
            classes = F.pad(classes, (0, length - classes.shape[1]))
        if classes is not None and self.training:
            classes = torch.where(numbers.uniform(CLASS) < self.options.class_dropout, self.options.classes, classes)
        data = self.path.embed(F.embedding(targets.clamp(min=0), self.get_input_embeddings().weight))
        x = t[..., None] * data + (1 - t[..., None]) * self._noise(reading.hidden, noise, numbers)
        return self.corrected(x, t, classes, reading)

    def _loss(self, hidden: Tensor, targets: Tensor, items: Any, *, is_full: bool) -> tuple[Tensor, Tensor | None]:
        """The mean over examples of their targets' mean cross-entropy, in nats (paper, equation 5), and all logits."""
        shown = targets != -100
        logits = self.logits(hidden) if is_full else None
        losses = F.cross_entropy(
            self.logits(hidden[shown]) if logits is None else logits[shown], targets[shown], reduction="none"
        )
        if items is not None:
            return losses.sum() / items, logits
        counts = shown.sum(dim=1, keepdim=True).expand_as(shown)
        return (losses / counts[shown]).sum() / shown.any(dim=1).sum().clamp(min=1), logits


def _tokens_before(tokens: Tensor | None, embeds: Tensor | None, mask: Any, position_ids: Any, cache: Any) -> Tensor:
    """The number of tokens, without padding, before the token that each position predicts, [B, T]."""
    like = tokens if embeds is None else embeds[..., 0]
    if position_ids is not None:
        return (position_ids + 1).expand(like.shape)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.long().cumsum(dim=1)[:, -like.shape[1] :]
    past = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(1, like.shape[1] + 1, device=like.device) + past).expand(like.shape)
