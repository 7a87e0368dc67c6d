"""Decoding in fewer passes over the weights: the next token begins while this one is checked, where that is faster."""
