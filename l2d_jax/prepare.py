"""Tokenises, packs and shards examples once: `python -m l2d_jax.prepare --config FILE --out DIR`.

`python -m l2d_jax.train` with the same config and `--config.data.prepared=DIR` then reads them from there, the same in
the same order, and neither downloads nor tokenises the source. The same command again goes on where it was cut off,
shard by shard, and mends a folder that was damaged. No weights are downloaded, and no device is used.
"""

import os
from dataclasses import replace

from l2d_jax import command_line
from l2d_jax.config import config_file
from l2d_jax.data import rows
from l2d_jax.data.examples import Examples
from l2d_jax.data.prepared import Preparation, training_splits
from l2d_jax.errors import require
from l2d_jax.storage import mirror
from l2d_jax.weights import base_model


def main() -> None:
    """Parse the command line, prepare what training with the config reads, and say what it takes."""
    parser = command_line.Parser(prog="python -m l2d_jax.prepare", description=__doc__)
    parser.add_argument("--config", required=True, help=config_file.CONFIG_HELP)
    parser.add_argument("--out", type=command_line.folder_or_bucket, required=True, help="folder for the examples")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type="Count", default=cores, help="that tokenise at once; default: all cores")
    options, config = parser.parse_with_config()
    require(config.data.prepared is None, "config.data.prepared names examples that are prepared already: leave it out")
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


if __name__ == "__main__":
    command_line.run(main)
