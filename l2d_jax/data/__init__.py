"""From rows of conversations to batches of token ids."""
