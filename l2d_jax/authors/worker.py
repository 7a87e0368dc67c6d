"""Times the authors' PyTorch release when asked, in a separate Python without JAX; `speed` starts it.

Standard input has a JSON line that describes the model, then one for each piece of work; a JSON line answers each.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from l2d_jax.authors.release_model import Release, open_release
from l2d_jax.errors import InputError

MATRICES = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")  # of the LM, that an evaluation reads


class Worker:
    """A random model of the release, and the work that it is timed at: each method returns wall-clock seconds."""

    def __init__(
        self, release: Release, *, family: str, base: dict[str, Any], path: dict[str, Any], dtype: str
    ) -> None:
        self.torch = release.torch
        self.torch.set_num_threads(len(os.sched_getaffinity(0)))
        config = release.transformers.AutoConfig.for_model(family, **base)
        model = release.transformers.AutoModelForCausalLM.from_config(config)
        self.model = release.model_class(family)(model_or_model_id=model, **path).to(getattr(self.torch, dtype)).eval()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = self.torch.optim.AdamW(self.trained, lr=1e-4, betas=(0.9, 0.95))
        self.matrices = [layer.weight for name, layer in model.named_modules() if name.endswith(MATRICES)]
        self.generate = release.function("pipeline/decoding_util.py", "autoregressive_decode")

    def decode(self, *, batch: int, prompt: int, new: int, method: str, points: int, has_table: bool) -> float:
        """Generate `new` tokens for each row once the prompts are read, and compute the vocabulary vectors once."""
        torch, inner, integrate = self.torch, self.model.model, self.model.nstep_inference
        began: list[float] = []

        def inference(**options: Any) -> Any:
            began.append(time.perf_counter())
            return integrate(**options)

        ids = torch.randint(self.model.vocab_size, (batch, prompt)).tolist()
        endless = SimpleNamespace(pad_token_id=-1, eos_token_id=-1)  # no token ends an answer
        with torch.no_grad(), mock.patch.multiple(self.model, nstep_inference=inference):
            known = inner.get_weighted_flow_representation_for_logits
            if has_table:  # at the velocity's temperature of 0, which is the release's
                table = inner.get_flow_representation_for_tokens(torch.arange(self.model.vocab_size))
                known = lambda logits, **_: table[logits.argmax(-1)]  # noqa: E731
            with (
                mock.patch.multiple(inner, get_weighted_flow_representation_for_logits=known),
                mock.patch.multiple(inner, ode_kwargs={"method": method}),
            ):
                self.generate(self.model, endless, ids, max_new_tokens=new, lad=True, ode_steps=points)
        return time.perf_counter() - began[0]

    def train(self, *, batch: int, length: int, answer: int, micro_batches: int) -> float:
        """One optimizer step on rows whose last `answer` positions have a loss."""
        torch = self.torch
        ids = torch.randint(self.model.vocab_size, (batch, length + 1))
        targets = ids[:, 1:].clone()
        targets[:, : length - answer] = -100  # no loss
        began = time.perf_counter()
        self.model.train()
        for rows, labels in zip(ids[:, :-1].chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            output = self.model(input_ids=rows, labels=labels, shifted_labels=True, use_cache=False)
            (output.loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.adam.step()
        self.adam.zero_grad()
        self.model.eval()
        return time.perf_counter() - began

    def multiply(self, *, batch: int) -> float:
        """The LM's products of an evaluation alone, by PyTorch."""
        inputs = {m.shape[1]: m.new_ones(batch, m.shape[1]) for m in self.matrices}
        with self.torch.no_grad():
            began = time.perf_counter()
            for matrix in self.matrices:
                self.torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)
        return time.perf_counter() - began


def main() -> None:
    """Answer until the input ends; the first answer is the number of bytes that `multiply` reads."""
    out, sys.stdout = sys.stdout, sys.stderr  # the release prints
    described = json.loads(sys.stdin.readline())
    try:
        worker = Worker(open_release(Path(described.pop("checkout"))), **described)
    except InputError as error:
        print(json.dumps({"error": str(error)}), file=out, flush=True)
        return
    print(json.dumps(sum(matrix.nbytes for matrix in worker.matrices)), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(worker, asked.pop("work"))(**asked)), file=out, flush=True)
