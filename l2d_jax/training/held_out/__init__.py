"""Measures a model under training on held-out examples: token by token, and with whole answers."""
