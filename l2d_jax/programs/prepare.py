"""Tokenises, packs and shards the data that training with a config reads."""

from argparse import Namespace
from dataclasses import replace

from l2d_jax.config.schema import Config
from l2d_jax.data import rows
from l2d_jax.data.examples import Examples
from l2d_jax.data.prepared import Preparation, training_splits
from l2d_jax.storage import mirror
from l2d_jax.weights import base_model


def run(options: Namespace, config: Config) -> None:
    """Prepare every split, and print its number of examples and the size of the folder."""
    rows.keep_quiet()
    tokenizer = base_model.find_tokenizer(config.model)
    preparation = Preparation(options.out, config.data, tokenizer, processes=options.processes)
    for data, split in training_splits(config):
        classes, tokenise = config.path.classes, preparation.tokenise
        examples = Examples.load(data, tokenizer, split=split, classes=classes, tokenise=tokenise)
        plans = examples.plans if data.packing and split == data.train_split else ()
        preparation.add(data, split, replace(examples.source, fingerprint=examples.fingerprint(), plans=plans))
        print(f"{split}: {examples.counts}", flush=True)
    size = preparation.finish()
    print(f"{size / 2**20:.1f} MiB; train with --config.data.prepared={mirror.shown_places(str(options.out))}")
