import pytest

from l2d_jax.data.chains import HOPS, LETTERS, chain_rows
from l2d_jax.errors import InputError


def test_working_follows_the_pairs() -> None:
    for row in chain_rows(300):
        _, question, answer = (message["content"] for message in row["messages"])
        *pairs, first = (line.split() for line in question.splitlines())
        following = dict(pairs)
        assert sorted(following) == sorted(following.values()) == list(LETTERS)
        letters = [first[1]]
        for _ in range(HOPS):
            letters.append(following[letters[-1]])
        assert [*row["working"], answer] == letters
        assert len(set(letters)) == HOPS + 1


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
