"""What deterministic answers cost: `python -m tests.serving.deterministic_speed [REQUESTS]`.

The model has 28 million random parameters in float32, and as many in a path. The requests have budgets of 1 and 3,
prompts of 3 to 380 tokens, and answers of 8 to 40 tokens; there are 8 lanes. Programs are compiled first.
"""

import sys
import time

from tests.serving.test_deterministic import answers
from tests.support.served import talking_model

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
SIZES |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def main() -> None:
    """Print the speed with and without the option."""
    numbers = range(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
    loaded = talking_model(sizes=SIZES)
    for is_fixed in (False, True, False, True):
        answers(loaded, [numbers], is_fixed=is_fixed, budgets=(1, 3))
        began = time.perf_counter()
        told = answers(loaded, [numbers], is_fixed=is_fixed, budgets=(1, 3))
        seconds, tokens = time.perf_counter() - began, sum(map(len, told.values()))
        name = "deterministic" if is_fixed else "as usual"
        print(f"{name}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
