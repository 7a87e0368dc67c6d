import re

import pytest

from l2d_jax.data.chains import OPERATIONS, chain_rows
from l2d_jax.errors import InputError


def test_results_are_those_of_each_operation() -> None:
    for row in chain_rows(300):
        _, question, answer = (message["content"] for message in row["messages"])
        first, *operations = re.findall(r"^\d|[-+*]\d", question)
        results = [int(first)]
        for sign, digit in operations:
            one, other = results[-1], int(digit)
            results.append({"+": one + other, "-": one - other, "*": one * other}[sign])
        assert [*row["working"], answer] == [str(result) for result in results]
        assert len(operations) == OPERATIONS
        assert all(0 <= result <= 9 for result in results)


def test_splits_share_no_chain() -> None:
    texts = {
        split: {row["messages"][1]["content"] for row in chain_rows(400, split=split)}
        for split in ("train", "validation", "test")
    }
    assert len(set.union(*texts.values())) == 1200
    assert chain_rows(5) == chain_rows(9)[:5]
    assert chain_rows(5, seed=1) != chain_rows(5)
    with pytest.raises(InputError, match="splits train, validation, test, not 'dev'"):
        chain_rows(1, split="dev")
