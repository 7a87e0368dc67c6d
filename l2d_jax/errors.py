"""The exceptions that programs print as one line: what a user can mend, and what has stopped a run."""


class InputError(ValueError):
    """Bad input: exit status 2. The message is one line: the rule, the offending value and the remedy."""


class RunError(RuntimeError):
    """A run that had to stop, or has lost something: exit status 1. The message is one line, like that of bad input."""
