"""The part of SmolTalk that the paper uses: its subsets, their rows, and the class of each row for guidance.

An example is one of the assistant's turns with everything before it; the paper counts these. Rows are filtered only by
category and length: context and answer, without the token that ends it, may have 2048 tokens.
(SakanaAI/L2D: `cfgs/training.cfg`, `tasks/smoltalk.py`, `tasks/constants.py`.)
"""

import datasets
import numpy as np

from l2d_jax.config.schema import CATEGORIES

SUBSETS = ("self-oss-instruct", "metamathqa-50k", "numina-cot-100k", "openhermes-100k", "smol-magpie-ultra")
LEFT_OUT = frozenset({"advice-seeking", "brainstorming", "creative-writing", "editing", "planning", "role-playing"})
EXAMPLES = {"train": 892_283, "test": 46_848}  # the paper's counts per split
MAX_LENGTH = 2048  # largest number of tokens of an example, for these counts

# The release's tables, in the names of `CATEGORIES`.
OF_SUBSET = {"self-oss-instruct": "coding", "openhermes-100k": "general_qa"}
OF_SUBSET |= dict.fromkeys(("metamathqa-50k", "numina-cot-100k"), "math")
OF_SUBSET |= dict.fromkeys(("smol-constraints", "smol-rewrite", "smol-summarize", "apigen-80k"), "other")
OF_SUBSET |= dict.fromkeys(("everyday-conversations", "explore-instruct-rewriting"), "other")
OF_SUBSET |= dict.fromkeys(("longalign", "systemchats-30k"), "other")
OF_CATEGORY = {"coding": "coding", "math": "math"}  # categories of smol-magpie-ultra, except LEFT_OUT
OF_CATEGORY |= dict.fromkeys(("data-analysis", "information-seeking", "reasoning"), "general_qa")


def select_rows(rows: datasets.Dataset, subset: str | None) -> datasets.Dataset:
    """The rows of a subset on which the paper trains, with a column `class` if all of them have a class.

    The class follows from the row's `category` or from the subset.
    """
    count = len(rows)
    categories = list(rows["category"]) if "category" in rows.column_names else [None] * count
    names = [OF_SUBSET.get(subset or "") if entry is None else OF_CATEGORY.get(entry) for entry in categories]
    kept = [number for number, category in enumerate(categories) if category not in LEFT_OUT]
    if all(names[number] is not None for number in kept) and "class" not in rows.column_names:
        classes = [0 if name is None else CATEGORIES.index(name) for name in names]
        rows = rows.add_column("class", np.array(classes, np.int64))  # before selecting rows, which this would copy
    return rows if len(kept) == count else rows.select(kept)
