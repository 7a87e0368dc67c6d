"""SmolLM2 135M Instruct on SmolTalk with the hyper-parameters of the paper (the defaults of `l2d_jax.config`)."""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 37,620,864 trainable parameters."""
    config = defaults()
    config.model.name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }
    return config


def small(config: ConfigDict) -> None:
    """The paper's path with sizes that two cores train in minutes instead of days on a pod, and why they differ.

    With sigma = 64 only t > 0.95 carries the token, and learning to use that takes tens of thousands of steps; a
    smaller sigma spreads the token over all t. The widths, rank and lengths are what a few minutes can train.
    """
    config.model.dtype = "float32"  # bfloat16 is faster where the CPU has AVX512-BF16 or AMX
    config.path.sigma = 8.0
    config.path.frequency_width = 64
    config.path.condition_width = 64
    config.path.lora_rank = 16
    config.path.lora_alpha = 16.0
    config.data.source = "problems"  # built in: arithmetic word problems with worked solutions
    config.data.validation_split = "validation"
    config.data.train_examples = 4000
    config.data.validation_examples = 32
    config.data.max_length = 128  # tokens; the longest problem takes 127
    config.data.answer_length = 64  # tokens
    config.optim.peak_rate = 3e-3
    config.optim.final_rate = 1e-4
    config.optim.warmup_steps = 20
    config.train.batch_size = 4
    config.train.steps = 250
    config.train.validate_every = 0  # at the start and at the end
    config.train.checkpoint_every = 50
    config.train.log_every = 10
    config.train.remat = "none"
    config.validation.budgets = (1, 3, 7, 15, 31)
    config.decode.max_new_tokens = 80


def quickstart(config: ConfigDict) -> None:
    """Better answers in minutes on two cores: `small`, but with a path that begins as the language model.

    Solutions are the steps of the calculation without sentences, two problems share a row, and half of the positions
    are trained on what the path itself estimates, as in decoding.
    """
    small(config)
    config.path.start = "anchored"
    config.path.lora_alpha = 32.0
    config.data.subsets = ("equations",)
    config.data.validation_examples = 16  # besides those that are answered
    config.data.packing = True
    config.data.max_length = 192  # tokens of a row
    config.data.answer_length = 72
    config.optim.peak_rate = 7e-4
    config.optim.final_rate = 1e-5
    config.optim.warmup_steps = 25
    config.train.own_estimates = 0.5
    config.train.batch_size = 1
    config.train.steps = 225
    config.train.checkpoint_every = 75
    config.validation.time_bins = 5
    config.validation.budgets = (1, 3, 7)
    config.validation.exact_examples = 40
    config.validation.exact_batch_size = 40
    config.validation.answer_every = 40
    config.decode.budget = 3


def chains(config: ConfigDict) -> None:
    """Evaluations that count: each does one of the 14 hops of a chain, and the last one says the letter at its end.

    What x_t shows matters here from the first evaluation on, so there is little noise, and an estimate replaces the one
    before it.
    """
    small(config)
    config.path.start = "anchored"
    config.path.lora_alpha = 32.0
    config.path.sigma = 0.1
    config.path.time_scale = 100.0
    config.data.subsets = ("chains",)
    config.data.working = 14
    config.data.train_examples = 20000
    config.data.max_length = 90  # tokens
    config.data.answer_length = 2
    config.optim.peak_rate = 2e-3
    config.optim.warmup_steps = 40
    config.train.batch_size = 16
    config.train.draws_per_context = 16
    config.train.steps = 400
    config.validation.budgets = (1, 3, 15)
    config.validation.exact_examples = 500
    config.validation.exact_batch_size = 100
    config.validation.time_bins = 15
    config.decode.solver = "restart"
