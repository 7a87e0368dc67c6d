"""Writes rows about as long as SmolTalk's, for measuring: `python -m tests.support.long_rows FOLDER ROWS`.

`python -m tests.support.long_rows FOLDER COPIES PREPARED` makes a prepared folder larger: it copies the shards of the
training split of PREPARED, over and over.

Two rows of five have three turns, the others one, so that 496,000 rows have the paper's number of examples. Questions
and answers are passages of this repository's pages and code, of log-normal lengths with medians of 400 and 1400
characters: about 100 and 350 tokens.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np

from l2d_jax.files import digest, read_json

ROOT = Path(__file__).parents[2]


def write_rows(folder: Path, count: int) -> None:
    """`train.jsonl` with `count` rows, and `test.jsonl` with 400."""
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "l2d_jax").rglob("*.py"))]
    text = "\n".join(file.read_text() for file in files)
    folder.mkdir(parents=True)
    for split, rows in (("train", count), ("test", 400)):
        rng = np.random.default_rng(len(split))
        with (folder / f"{split}.jsonl").open("w") as file:
            for row in range(rows):
                messages = []
                for turn in range(6 if row % 5 < 2 else 2):
                    size = int((400, 1400)[turn % 2] * np.exp(rng.normal() * 0.7)) + 1
                    start = int(rng.integers(len(text) - size))
                    messages.append({"role": ("user", "assistant")[turn % 2], "content": text[start : start + size]})
                file.write(json.dumps({"messages": messages}) + "\n")


def repeat(folder: Path, count: int, prepared: Path) -> None:
    """A prepared folder with `count` copies of the training examples of another, and no plan of packing."""
    shutil.copytree(prepared, folder)
    manifest = read_json(folder / "manifest.json")
    manifest.pop("digest")
    entry = manifest["splits"]["train-all"]
    names = [(name, f"{copy:03d}{name[3:]}") for copy in range(count) for name in entry["shards"]]
    for name, copied in names:
        shutil.copyfile(folder / "shards" / name, folder / "shards" / copied)
    entry |= {"shards": [copied for _, copied in names], "plans": []}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "digest": digest(manifest)}))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write_rows(Path(sys.argv[1]), int(sys.argv[2]))
    else:
        repeat(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
