"""The exceptions that programs print as one line: for what a user can mend, and for what has stopped a run."""


class InputError(ValueError):
    """Bad input: exit status 2. The message is one line: the rule, the offending value and the remedy."""


class RunError(RuntimeError):
    """A run had to stop, or has lost something: exit status 1. The message is one line, like that of `InputError`."""
