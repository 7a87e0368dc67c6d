"""Records what the authors' PyTorch release computes, for `verify --reference`.

`python -m l2d_jax.authors.record --release CHECKOUT --tiny VARIANT --out DIR` records a tiny random model. DIR gets
`base/`, `l2d.safetensors`, `l2d.json`, `reference.npz` and `meta.json`, which describes the runs. With `--base HF_DIR
--l2d FILE --hyperparameters FILE` instead of `--tiny` it records your model, and DIR gets the last two. With `--names
FILE.json` alone it records the names and shapes of the state dict of every variant.

CHECKOUT is a checkout of github.com/SakanaAI/L2D. It needs a separate environment, without JAX (`release_model` names
the versions). All numbers are float32, on the CPU.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np

from l2d_jax.authors import release_model
from l2d_jax.authors.recorder import Recorder
from l2d_jax.authors.release_model import Release
from l2d_jax.errors import InputError
from l2d_jax.storage.partial import output_folder


def write_names(release: Release, file: Path) -> None:
    """The names and shapes of every variant's state dict, aliases included, with what the models are built from."""
    variants = {}
    for variant in release_model.VARIANTS:
        model, described = release_model.build_tiny(release, variant, seed=0)
        shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        family = described["family"]
        named = {"tie_word_embeddings", "rope_scaling", *release_model.BASE, *release_model.FAMILIES[family]}
        base = {name: value for name, value in model.config.to_dict().items() if name in named}
        base = {"architectures": [f"{family.capitalize()}ForCausalLM"], **base}
        variants[variant] = {"base": base, **described, "tensors": shapes}
    lines = [f"{json.dumps(name)}: {json.dumps(variant)}" for name, variant in variants.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_tiny(release: Release, variant: str, out: Path, *, seed: int) -> tuple[Any, dict[str, Any]]:
    """A tiny model's files: its base, the state dict and the hyper-parameters."""
    model, described = release_model.build_tiny(release, variant, seed=seed)
    base = release.transformers.AutoModelForCausalLM.from_config(model.config)
    base.load_state_dict(model.state_dict(), strict=False)
    base.save_pretrained(out / "base")
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}  # aliases take space
    from safetensors.torch import save_file

    save_file(state, out / "l2d.safetensors")
    (out / "l2d.json").write_text(json.dumps(described, indent=1) + "\n")
    return model, described


def main() -> None:
    """Parse the command line and write the recording."""
    parser = argparse.ArgumentParser(prog="python -m l2d_jax.authors.record", description=__doc__)
    parser.add_argument("--release", type=Path, required=True, help="a checkout of the authors' release")
    parser.add_argument("--out", type=Path, help="a new or empty folder")
    parser.add_argument("--tiny", metavar="VARIANT", help=f"one of {', '.join(release_model.VARIANTS)}")
    parser.add_argument("--base", type=Path, help="the language model, a folder as transformers reads it")
    parser.add_argument("--l2d", type=Path, help="a state dict of the release")
    parser.add_argument("--hyperparameters", type=Path, help="the release's keyword arguments, JSON")
    parser.add_argument("--names", type=Path, help="write the tensor names and shapes of every variant into this file")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny model and of the inputs; 0")
    options = parser.parse_args()
    release = release_model.open_release(options.release)
    if options.names is not None:
        write_names(release, options.names)
        return
    own = [options.base, options.l2d, options.hyperparameters]
    if options.out is None or (options.tiny is None) == any(file is None for file in own):
        raise InputError("give --out with --tiny VARIANT, or with all of --base, --l2d and --hyperparameters")
    with output_folder(options.out) as folder:
        if options.tiny is not None:
            model, described = write_tiny(release, options.tiny, folder, seed=options.seed)
        else:
            model, described = release_model.open_model(release, *own)
        recorder = Recorder(release, model, described["family"], seed=options.seed)
        recorder.record()
        np.savez_compressed(folder / "reference.npz", **cast(dict[str, Any], recorder.arrays))
        (folder / "meta.json").write_text(json.dumps(recorder.meta, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
