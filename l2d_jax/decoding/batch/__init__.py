"""Answers as rows of a batch: prompts are read, and each row goes from one answer to the next."""
