"""The paper's tasks: prompts, answers, scores and their statistics."""
