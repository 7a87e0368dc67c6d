"""Comparisons with the authors' implementation and with transformers."""
