"""Marks for parameters of tests."""

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters that only `--slow` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
