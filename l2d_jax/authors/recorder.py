"""Records what the authors' PyTorch release computes with one model: inputs, single evaluations, training and runs."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from l2d_jax.authors import runs
from l2d_jax.authors.release_model import Release
from l2d_jax.authors.runs import Arrays

LENGTH = 12
PAD, END = 3, 7  # token ids that no random prompt holds
SPECIAL_TIMES = (0.0, 1e-3, 0.5, 0.999, 1.0), (0.9, 0.9999, 0.0)  # at the start of row 0, at the end of row 1
STEPS = 5  # of the optimizer
ITEMS: list[dict[str, Any]] = [  # two examples for the release's own batching
    {"context": [9, 10, 11], "response": [12, 13], "category_id": 2},
    {"context": [14, 15], "response": [16, 17, 18, 19], "category_id": 0},
]


class Recorder:
    """The arrays and the description of one model's recording."""

    def __init__(self, release: Release, model: Any, family: str, *, seed: int) -> None:
        self.release, self.torch, self.model, self.family = release, release.torch, model, family
        self.random = np.random.default_rng(seed)
        self.tensor = release.torch.tensor
        self.arrays: Arrays = {}
        self.meta: dict[str, Any] = {}
        self.width = model.model.flow_representation_dim
        self.sigma = model.noise_rescaling
        self.classes = (model.guidance_modulation_num_classes or 0) if model.use_guidance else 0
        self.labels = np.array([0, self.classes - 1])  # of two rows, with classes
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def keep(self, name: str, array: np.ndarray) -> np.ndarray:
        """Record an input, and return it."""
        self.arrays[name] = array
        return array

    def normal(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Unit normal noise, an input."""
        return self.keep(name, self.random.standard_normal(shape, np.float32))

    def record(self) -> None:
        """All of it, in an order that decides the random inputs."""
        for record in (self.single_evaluations, self.training, self.packing, self.optimization, self.runs):
            record()

    def evaluate(self, ids: Any, x: Any = None, t: Any = None, **options: Any) -> np.ndarray:
        """Logits of the LM, or of one evaluation of the path."""
        with self.torch.no_grad():
            given = {"input_ids": ids, "timesteps": t, "flow_representation_embeds": x, "use_cache": False}
            return self.model(**given, **options).logits.numpy()

    def single_evaluations(self) -> None:
        """Logits, intermediate values, and the same for a batch that is padded on the left."""
        model, shape = self.model, (2, LENGTH)
        text = self.random.integers(END + 1, model.vocab_size, (2, LENGTH + 1))
        shifted = {"input_ids": text[:, :-1], "target_ids": text[:, 1:]}
        ids, targets = (self.tensor(self.keep(*pair)) for pair in shifted.items())
        times = self.random.random(shape, np.float32)
        times[0, : len(SPECIAL_TIMES[0])], times[1, -len(SPECIAL_TIMES[1]) :] = SPECIAL_TIMES
        t, noise = self.tensor(self.keep("timesteps", times)), self.normal("noise", (*shape, self.width))
        with self.torch.no_grad():
            table = model.model.get_flow_representation_for_tokens(self.torch.arange(model.vocab_size))
        x = (1 - t[..., None]) * self.sigma * self.tensor(noise) + t[..., None] * table[targets]
        self.arrays |= self.inside(ids, x, t)
        self.arrays |= {"flow_representation_embeds": x.numpy(), "vocab_table": table.numpy()}
        self.arrays["base_logits"] = self.evaluate(ids)
        self.arrays["l2d_logits_t0.7"] = self.evaluate(ids, x, self.torch.tensor(0.7))
        if self.classes:
            labels = self.tensor(self.keep("class_labels", self.labels))
            self.arrays["l2d_logits_class"] = self.evaluate(ids, x, t, class_labels=labels)
        mask = np.ones(shape, np.int64)
        mask[1, : LENGTH - 7] = 0
        mask = self.keep("lp.attention_mask", mask)
        positions = self.keep("lp.position_ids", np.maximum(np.cumsum(mask, axis=1) - 1, 0))
        padded = self.tensor(self.keep("lp.input_ids", np.where(mask == 1, ids.numpy(), PAD)))
        placing = {"attention_mask": self.tensor(mask), "position_ids": self.tensor(positions)}
        self.arrays["lp.base_logits"] = self.evaluate(padded, **placing)
        self.arrays["lp.l2d_logits"] = self.evaluate(padded, x, t, **placing)

    def inside(self, ids: Any, x: Any, t: Any) -> Arrays:
        """Logits of one evaluation of the path, and the values within."""
        inner = self.model.model
        parts = {"time": inner.timestep_embedder, "frequency": inner.timestep_embedder.mlp[0]}
        parts |= {"flow": inner.flow_to_lm_encoder, "merge": inner.modulation_head}
        parts |= {f"layer{i}": layer for i, layer in enumerate(inner.layers)}
        seen = {name: mock.Mock(return_value=None) for name in parts}
        hooks = [part.register_forward_hook(seen[name]) for name, part in parts.items()]
        logits = self.evaluate(ids, x, t)
        for hook in hooks:
            hook.remove()
        inputs, outputs = ({name: call.call_args_list[0].args[i] for name, call in seen.items()} for i in (1, 2))
        at_zero = seen["merge"].call_args_list[1].args[2]  # the second evaluation is at t = 0
        values = {"freq": inputs["frequency"][0], "t_emb": outputs["time"], "flow_in": outputs["flow"]}
        values["w_d"] = outputs["merge"] - at_zero
        for i in range(len(inner.layers)):
            values[f"layer{i}.hidden"], values[f"layer{i}.flow"] = outputs[f"layer{i}"][:2]
        return {"l2d_logits": logits, **{f"mid.{name}": value.numpy() for name, value in values.items()}}

    def training(self) -> None:
        """One training forward, its loss and all gradients."""
        text = self.random.integers(END + 1, self.model.vocab_size, (2, LENGTH + 1))
        labels = text[:, 1:].copy()
        labels[0, :4], labels[1, :2], labels[1, -3:] = -100, -100, -100
        batch = {"input_ids": text[:, :-1], "labels": labels} | ({"class_labels": self.labels} if self.classes else {})
        self.batch = {name: self.tensor(self.keep(f"tr.{name}", array)) for name, array in batch.items()}
        loss, logits = self.loss(self.batch, self.noise("tr", (2, LENGTH)))
        loss.backward()
        self.arrays |= {"tr.loss": loss.detach().numpy(), "tr.logits": logits.detach().numpy()}
        for name, parameter in self.trained.items():
            self.arrays[f"grad.{name}"] = parameter.grad.numpy().copy()
        self.model.zero_grad()

    def noise(self, prefix: str, shape: tuple[int, ...]) -> Arrays:
        """What a training forward draws: the times, the noise, and with classes whether one is dropped."""
        drawn = {"timesteps": self.keep(f"{prefix}.timesteps", self.random.random(shape, np.float32))}
        drawn["noise"] = self.normal(f"{prefix}.noise", (*shape, self.width))
        if self.classes:
            drawn["drop"] = self.keep(f"{prefix}.drop_uniform", self.random.random(shape, np.float32))
        return drawn

    @contextmanager
    def drawing(self, drawn: Arrays) -> Iterator[None]:
        """Gives these in place of torch's random numbers: the drops, then the times, and the noise."""
        uniform = iter([self.tensor(drawn[name]) for name in ("drop", "timesteps") if name in drawn])
        self.model.train()
        noise = self.tensor(drawn["noise"])
        draws: dict[str, Any] = {"rand": lambda *_, **__: next(uniform), "randn_like": lambda *_, **__: noise}
        with mock.patch.multiple(self.torch, **draws):
            yield
        self.model.eval()
        assert next(uniform, None) is None

    def loss(self, batch: Mapping[str, Any], drawn: Arrays) -> tuple[Any, Any]:
        """Loss and logits of a training forward."""
        with self.drawing(drawn):
            output = self.model(**batch, shifted_labels=True, use_cache=False)
        return output.loss, output.logits

    def packing(self) -> None:
        """The batch and the loss that the release's training makes of two examples."""
        step = self.release.function("training.py", "train_forward_step")
        items = [item if self.classes else {**item, "category_id": None} for item in ITEMS]
        length = max(len(item["context"]) + len(item["response"]) for item in items)
        watched = mock.Mock(side_effect=self.model, device=self.torch.device("cpu"))
        settings = Namespace(lad=True, num_t_bins=None, compute_diff_at_training=False)
        with self.drawing(self.noise("pack", (2, length))), self.torch.no_grad():
            loss = step(0, watched, Namespace(eos_token_id=END), items, settings)[0]
        self.arrays["pack.loss"] = loss.numpy()
        self.arrays |= {f"pack.{name}": watched.call_args.kwargs[name].numpy() for name in self.batch}
        self.meta["pack_items"] = items

    def optimization(self) -> None:
        """Steps of AdamW on the training batch by the recipe of the release, with fresh times and noise each."""
        torch = self.torch
        start = {name: p.detach().clone() for name, p in self.trained.items()}
        groups = [
            {"params": [p for name, p in self.trained.items() if ("bias" in name) == is_bias], "weight_decay": decay}
            for is_bias, decay in ((True, 0.0), (False, 0.01))
        ]
        adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
        drawn = self.noise("opt", (STEPS, 2, LENGTH))
        losses, norms = [], []
        for step in range(STEPS):
            loss, _ = self.loss(self.batch, {name: array[step] for name, array in drawn.items()})
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0).numpy())
            losses.append(loss.detach().numpy())
            adam.step()
            self.model.zero_grad()
        self.arrays |= {"opt.losses": np.stack(losses), "opt.grad_norms": np.stack(norms)}
        with torch.no_grad():
            for name, parameter in self.trained.items():
                self.arrays[f"opt.final.{name}"] = parameter.numpy().copy()
                parameter.copy_(start[name])

    def runs(self) -> None:
        """Every ODE, and whole generations."""
        x0 = self.sigma * self.random.standard_normal((2, LENGTH, self.width), np.float32)
        given = {"x0": self.tensor(x0)}
        named = ("input_ids", "class_labels", "lp.input_ids", "lp.attention_mask", "lp.position_ids")
        given |= {name: self.tensor(self.arrays[name]) for name in named if name in self.arrays}
        self.meta["odes"] = {}
        for run in (*runs.fixed_step_runs(classes=self.classes), *runs.adaptive_runs()):
            self.torch.manual_seed(0)
            arrays, described = runs.record_run(self.release, self.model, self.family, run, given)
            self.arrays |= arrays
            self.meta["odes"][run.name] = described
        ids, mask = self.arrays["input_ids"], self.arrays["lp.attention_mask"]
        prompts = [[int(token) for token in row[keep == 1]] for row, keep in zip(ids, mask, strict=True)]
        labels = self.arrays["class_labels"].tolist() if self.classes else None
        options: dict[str, Any] = {"noise": self.normal, "labels": labels, "pad": PAD}
        self.meta["decode"] = runs.record_generations(self.release, self.model, prompts, **options)
