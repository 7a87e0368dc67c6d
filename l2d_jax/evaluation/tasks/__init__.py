"""The evaluation tasks of the paper, without a model: their prompts, and the scores of completions."""
