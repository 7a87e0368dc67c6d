"""The page on errors: the lines that it explains are lines that the package prints."""

import re
from itertools import combinations

import pytest

from tests.support.programs import ROOT

SOURCE = "\n".join(file.read_text() for file in sorted((ROOT / "l2d_jax").rglob("*.py")))
UNCHECKED = ("An NVIDIA GPU", "RESOURCE_EXHAUSTED", "Killed")  # printed by JAX, XLA and Linux
UNCHECKED += ("rows need",)  # the rest of the line are values
LENGTH = 12  # characters of neighbouring words that no other text has by accident
MESSAGES = re.findall(r"^### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", [line for line in MESSAGES if not line.startswith(UNCHECKED)])
def test_the_package_prints_this_line(message):
    """The source has several neighbouring words of it; the others may be values."""
    words = message.split()
    runs = (" ".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2) if end - start > 1)
    assert any(len(run) >= LENGTH and run in SOURCE for run in runs)


def test_the_page_has_messages():
    assert len(MESSAGES) > 20
