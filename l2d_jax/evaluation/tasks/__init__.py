"""The evaluation tasks of the paper, independent of any model: prompts, and scores of completions."""
