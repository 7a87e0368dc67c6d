"""Tools that a model may call: how a chat template writes calls, their grammar, and calls read from an answer."""
