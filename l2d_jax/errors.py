"""The one exception that users cause and can mend: programs print it as one line and exit with status 2."""


class InputError(ValueError):
    """Bad input. The message is one line: the rule, the offending value and the remedy."""
