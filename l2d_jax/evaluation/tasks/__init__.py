"""The evaluation tasks of the paper, without a model: what is asked, and what an answer is worth."""
