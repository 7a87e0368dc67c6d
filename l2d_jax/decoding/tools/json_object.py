"""Finds the end of a JSON object that arrives in pieces."""


class JsonObject:
    """A JSON object as far as it has arrived; only its brackets and strings are looked at."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_begun = False
        self.is_complete = False

    def add(self, text: str) -> int:
        """Read text, which begins or continues the object; returns the number of its characters that belong to it."""
        self.is_begun = True
        for place, character in enumerate(text, 1):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    self.is_complete = True
                    return place
        return len(text)
