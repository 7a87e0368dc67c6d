"""The evaluation tasks of the paper, without a model: what is asked, and what an answer is worth."""

from l2d_jax.tasks.problem import CATEGORIES, Problem, Program, Prompts, Run, Sampling, Score, Verdict
from l2d_jax.tasks.registry import PAPER, TASKS, find
from l2d_jax.tasks.task import MAX_LENGTH, Task, encode
