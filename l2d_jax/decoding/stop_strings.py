"""Answers that are still being generated: their text, and the stop strings in it."""

from collections.abc import Sequence
from copy import copy

from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import text_ids
from l2d_jax.errors import InputError


class StopSearch:
    """Finds stop strings in an answer that comes token by token, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerFast | None) -> None:
        """A string may be the name of a special token; raises `InputError` for one that no answer can contain."""
        self._stops: list[str] = []
        self._stop_ids: list[int] = []
        for stop in stops:
            if tokenizer is None:
                raise InputError("stop strings need a tokenizer, and the model folder has none: add its files")
            if stop and to_text(text_ids([stop], tokenizer)[0], tokenizer) == stop:
                self._stops.append(stop)
            elif stop in tokenizer.added_tokens_encoder:
                self._stop_ids.append(tokenizer.added_tokens_encoder[stop])
            else:
                problem = f"the stop string {stop!r} cannot occur in an answer, from which special tokens are left out"
                raise InputError(f"{problem}: give ordinary text or a single special token")
        self._tokenizer = tokenizer
        self._answer: list[int] = []
        self._released = 0  # tokens that `add` has returned

    def again(self) -> "StopSearch":
        """A search for the same strings in another answer."""
        other = copy(self)
        other._answer, other._released = [], 0
        return other

    def add(self, ids: Sequence[int], *, is_last: bool) -> tuple[list[int], str, bool]:
        """Add new tokens to the answer: which of its tokens no longer belong to a stop string, and whether one ends it.

        The token in which a stop string begins is left out; between both stands its text before that string.
        """
        end = min((ids.index(stop) for stop in self._stop_ids if stop in ids), default=len(ids))
        has_stop_id = end < len(ids)
        if not self._stops:
            return list(ids[:end]), "", has_stop_id
        answer, released = self._answer, self._released
        answer.extend(ids[:end])
        text = to_text(answer, self._tokenizer)
        places = [place for place in map(text.find, self._stops) if place >= 0]
        held = 0 if is_last or has_stop_id else max(map(len, self._stops)) - 1
        certain = min(places, default=len(text) - held)
        count = len(answer)
        while count > released and len(to_text(answer[:count], self._tokenizer)) > certain:
            count -= 1
        self._released = count
        rest = text[len(to_text(answer[:count], self._tokenizer)) : certain] if places else ""
        return answer[released:count], rest, has_stop_id or bool(places)


class GrowingText:
    """The text of an answer that comes token by token, in pieces that are complete in UTF-8."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""

    def add(self, ids: Sequence[int], *, is_last: bool, rest: str = "") -> str:
        """Add new tokens, and the `rest` of one that is left out, to the answer; what they add to its text."""
        self.ids += ids
        text = to_text(self.ids, self._tokenizer) + rest
        if text.endswith("\ufffd") and not is_last:  # the rest of a character is still to come
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new


def to_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast | None) -> str:
    """An answer as text, without special tokens. The tokenizer must not be None."""
    assert tokenizer is not None
    # Llama's tokenizers ask for a clean-up, with which "a" and " ." would be "a.": a stream cannot take a space back.
    text = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
