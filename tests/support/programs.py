"""Runs the programs as their users do, but in this process: a start of Python costs five seconds."""

import contextlib
import dataclasses
import io
import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file
from transformers import PreTrainedTokenizerFast

from l2d_jax import command_line
from l2d_jax.config import config_file
from l2d_jax.config.schema import Config, ModelConfig, PathConfig
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.evaluate import OF_MODEL, SECTIONS
from l2d_jax.files import read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.training.metrics import read_metrics
from l2d_jax.weights import base_model, mapping, model_folder, release
from tests.support import tiny

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT.parent / "shared" / "fixtures"
TINY = ROOT / "configs" / "tiny.py"
RECORDINGS = ROOT / "tests" / "parity" / "recordings"
STATE_DICTS = json.loads((RECORDINGS / "state_dicts.json").read_text())  # of every variant of the release

# What makes configs/tiny.py tinier: a step compiles and runs in a second.
SMALLER = {
    "path.width": 8,
    "path.translation_width": 8,
    "path.frequency_width": 8,
    "path.condition_width": 8,
    "path.lora_rank": 2,
    "data.train_examples": 16,
    "data.validation_examples": 2,
    "data.max_length": 256,
    "data.answer_length": 128,
    "validation.batch_size": 2,
    "train.batch_size": 2,
}


TIMES = ("tokens_per_second", "seconds/")  # what a record says of time, which no two runs have alike

PATH = PathConfig(width=8, translation_width=8, frequency_width=8, condition_width=8, lora_rank=2, lora_alpha=2.0)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of bad input."""
        assert self.status == 2, self
        assert self.err.startswith("error: "), self
        assert self.err.endswith("\n"), self
        assert self.err.count("\n") == 1, self
        return self.err.removeprefix("error: ").strip()


@contextlib.contextmanager
def _arguments(*arguments: Any) -> Iterator[None]:
    before, sys.argv = sys.argv, ["program", *map(str, arguments)]
    try:
        yield
    finally:
        sys.argv = before


def call(main: Callable[[], int | None], *arguments: Any) -> Outcome:
    """Run a program's `main` with a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _arguments(*arguments):
        try:
            command_line.run(main)
        except SystemExit as end:
            return Outcome(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("a program ends with its exit status")


def options(**changes: Any) -> list[str]:
    """`--config` with configs/tiny.py made smaller, and changes in which `__` stands for the dot."""
    given = SMALLER | {name.replace("__", "."): value for name, value in changes.items()}
    return ["--config", str(TINY), *(f"--config.{name}={value}" for name, value in given.items())]


def of_evaluation(arguments: list[str]) -> list[str]:
    """What `evaluate` reads of the options of a training: the config file, and overrides of some names."""
    read = (*(f"--config.{section}." for section in SECTIONS), *(f"--config.{name}=" for name in OF_MODEL))
    return [*arguments[:2], *(one for one in arguments[2:] if one.startswith(read))]


def config(**changes: Any) -> Config:
    """The config of `options(**changes)`."""
    reference, overrides = options(**changes)[1], options(**changes)[2:]
    return config_file.read_config(reference, config_file.split_overrides(overrides))


def write_base(folder: Path, *, text: bool = True, **changes: Any) -> Path:
    """A Hugging Face folder with the random weights of configs/tiny.py, and the tokenizer of bytes."""
    raw = {**(config().model.architecture or {}), **changes}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(base_tensors(**changes), folder / "model.safetensors", metadata={"format": "pt"})
    if text:
        byte_tokenizer().save_pretrained(folder)
    return folder


class Base(NamedTuple):
    """A frozen language model, read."""

    llm: LLM
    tokenizer: PreTrainedTokenizerFast | None
    stop_ids: tuple[int, ...]


def open_base(config: ModelConfig, mesh: Mesh, *, seed: int = 0) -> Base:
    """Find the base model and load it onto the mesh."""
    found = base_model.find_base(config)
    return Base(found.load(dtype=config.dtype, mesh=mesh, seed=seed), found.tokenizer, found.stop_ids)


def write_model(folder: Path, base: Path, mesh: Mesh, *, seed: int = 0, **changes: Any) -> Path:
    """A model folder with a path that says something else than its base."""
    shutil.copytree(base, folder)
    architecture = Architecture.from_hf(read_json(base / "config.json"))
    path = tiny.randomise(DiffusionPath.declare(dataclasses.replace(PATH, **changes), architecture), seed=seed)
    path = dataclasses.replace(path, merge=jax.tree.map(lambda leaf: 10 * np.asarray(leaf), path.merge))
    fingerprint = base_model.find_base(ModelConfig(name=str(base))).fingerprint
    model_folder.save_path(folder, path, base=str(base), base_fingerprint=fingerprint)
    return folder


def write_tasks(folder: Path) -> Path:
    """Rows of three tasks, in the form of their data sets."""
    sums = [{"question": f"{i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(8)]
    choices = [
        {"question": f"{i}?", "subject": "sums" if i % 2 else "signs", "choices": list("abcd"), "answer": 0}
        for i in range(6)
    ]
    code = {"code": "def add(a, b):\n    return a + b", "test_list": ["assert add(1, 2) == 3"]}
    tasks = [{"task_id": i, "text": f"Add {i}.", **code} for i in range(2)]
    files = {"gsm8k/train": sums, "gsm8k/test": sums, "mmlu/dev": choices, "mmlu/test": choices}
    files |= {"mbpp/prompt": tasks[:1], "mbpp/train": tasks[:1], "mbpp/test": tasks[1:]}
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def base_tensors(*, seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """Random tensors by their names in Hugging Face's layout; a model that answers in letters, not in odd bytes."""
    architecture = Architecture.from_hf({**(config().model.architecture or {}), **changes})
    rng = np.random.default_rng(seed)
    shapes = mapping.tensor_shapes(LLM.declare(architecture, dtype=jnp.float32), mapping.LLM_ROWS)
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name in tensors.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        tensors[name][128:] = 0
    return tensors


def write_release(folder: Path, kind: str, **changes: Any) -> dict[str, np.ndarray]:
    """A base of `tiny` with a checkpoint of the release: `base/`, `l2d.safetensors`, `l2d.json`; the checkpoint."""
    llm, path = tiny.llm(kind), tiny.path(kind, **changes)
    base = {name: make() for name, make in mapping.tensors(llm, mapping.LLM_ROWS)}
    trained = {name: make() for name, make in mapping.tensors(path, mapping.PATH_ROWS)}
    state = base | trained | {alias: base[name] for alias, name in release.aliases(base, trained).items()}
    (folder / "base").mkdir(parents=True)
    (folder / "base" / "config.json").write_text(json.dumps(tiny.CONFIGS[kind]))
    save_file(base, folder / "base" / "model.safetensors", metadata={"format": "pt"})
    save_file(state, folder / "l2d.safetensors")
    (folder / "l2d.json").write_text(json.dumps({"l2d_kwargs": release.options(path.config)}))
    return state


@contextlib.contextmanager
def full_disk(*, room: int = 0) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes; for a moment, since its output may go to files too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees have the same leaves, bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in ((np.asarray(a), np.asarray(b)) for a, b in pairs)
    )


def without_times(workdir):
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in read_metrics(workdir)]


def remove_tokenizer(base):
    for file in base.glob("*token*"):
        file.unlink()


def remove_template(base):
    for file in base.glob("*.jinja"):
        file.unlink()
    file = base / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in read_json(file).items() if k != "chat_template"}))
