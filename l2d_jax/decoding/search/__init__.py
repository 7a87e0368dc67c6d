"""Beam search over the tokens of an answer."""
