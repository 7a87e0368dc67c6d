"""Runs one part of a device check: `python -m tests.device.part NAME OPTIONS`, as `tests.device.check` starts it."""

import importlib
import sys

from tests.device.options import Options
from tests.device.table import Rows


def main() -> None:
    """Import the part's module, and run it: it writes rows."""
    name, text = sys.argv[1:]
    options = Options.load(text)
    places = {"PyTorch decoding": "published", "PyTorch training": "published", "more decoding": "decoding"}
    rows = Rows(name, options.rows_file(name))
    with rows.guard("-"):
        importlib.import_module(f"tests.device.{places.get(name, name)}").run(rows, options)


if __name__ == "__main__":
    main()
