"""The generated pages of docs/reference say what the code says."""

import pytest

from docs import generate

PAGES = generate.pages()


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_the_page_is_what_the_script_writes(file):
    assert file.read_text() == PAGES[file], "run: python docs/generate.py"
