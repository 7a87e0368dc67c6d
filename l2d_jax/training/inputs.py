"""The inputs of a run: the files of its base model, and the examples for training and validation."""

from dataclasses import dataclass
from functools import partial

from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.data.examples import Examples
from l2d_jax.data.prepared import read_prepared, training_splits
from l2d_jax.data.tokenizer import require_tokenizer
from l2d_jax.files import Fingerprint
from l2d_jax.training.held_out.exact_match import MarkedProblems
from l2d_jax.training.memory import check_training_memory
from l2d_jax.training.stopwatch import StartWatch
from l2d_jax.weights import base_model


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run; equal on every process."""

    base: base_model.BaseFiles
    training: Examples
    held_out: Examples  # for validation
    problems: MarkedProblems | None  # problems that validation answers freely, if any

    @classmethod
    def read(cls, config: Config, mesh: Mesh, watch: StartWatch) -> "Inputs":
        """Find, or download, the base model, and tokenise the examples; raises `InputError`."""
        data, count = config.data, config.validation.exact_examples
        if data.prepared is not None:
            for prepared, split in training_splits(config):
                read_prepared(prepared, split)  # before a base is downloaded
        base = base_model.find_base(config.model)
        tokenizer = require_tokenizer(base.tokenizer)
        check_training_memory(config, base.architecture, mesh)
        watch.ended("base model")
        load = partial(Examples.load, data, tokenizer, classes=config.path.classes)
        training, held_out = load(split=data.train_split), load(split=data.validation_split)
        return cls(base, training, held_out, MarkedProblems.read(data, tokenizer, count=count) if count else None)

    def fingerprints(self) -> tuple[Fingerprint, Fingerprint]:
        """The fingerprints of the base and of the examples."""
        splits = {"training examples": self.training, "validation examples": self.held_out}
        return self.base.fingerprint, {name: examples.fingerprint() for name, examples in splits.items()}
