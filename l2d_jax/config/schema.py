"""Every option of the project, as frozen dataclasses that check themselves on construction.

A config file holds what differs from these defaults (`configs/`); `defaults()` turns them into the editable
`ml_collections.ConfigDict` that such a file starts from, and `Config.from_dict` turns the edited dictionary back.
The defaults are the paper's hyper-parameters (appendix, Table of implementation hyper-parameters).
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from ml_collections import ConfigDict

import l2d_jax.config.ranges as ranges
from l2d_jax.config.conflicts import check_conflicts
from l2d_jax.config.parsing import check_fields, from_dict, nearest
from l2d_jax.errors import require

CATEGORIES = ("math", "coding", "general_qa", "other")  # the classes that guidance knows, in the release's order
SolverName = Literal[ranges.FixedSolver, ranges.AdaptiveSolver]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # as PEFT names them


@dataclass(frozen=True)
class ModelConfig:
    """The language model. A path leaves its weights as they are."""

    name: str = ""  # folder of a model or adapter, hub id or GGUF file; "random": random weights for `architecture`
    tokenizer: str | None = None  # folder or hub id of another tokenizer; None: the tokenizer of the model
    # .jinja file, folder or hub id with a chat template, or "base_llama", for base models; None: that of the tokenizer
    chat_template: str | None = None
    architecture: Mapping[str, Any] | None = None  # keys of a Hugging Face config.json; None: read from the model
    # type of weights and products; "int8": int8 weights, bfloat16 products
    dtype: Literal["bfloat16", "float32", "int8"] = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.model")
        require(self.name != "", "config.model.name is empty: give a folder, a hub id or a GGUF file")
        problem = "config.model.name is 'random' but config.model.architecture is None"
        require(self.name != "random" or self.architecture is not None, f"{problem}: give the keys of a config.json")


@dataclass(frozen=True)
class PathConfig:
    """The trainable diffusion path (paper section 3)."""

    width: ranges.Width = 256  # width d̄ of the diffusion token
    translation_width: ranges.Width = 256  # hidden width of the MLP that maps a diffusion token to the model width
    frequency_width: ranges.Width = 256  # number of cosine and sine features of t; it is even
    time_scale: ranges.Scale = 1.0  # factor of t in these features; about 100 separates the steps of a working
    condition_width: ranges.Width = 256  # width of the embedding of time and class
    sigma: ranges.Scale = 64.0  # standard deviation of the noise x_0
    # what an untrained path computes: no correction, or the same as the LM
    start: Literal["released", "anchored"] = "released"
    # model that reads the context: the frozen LM, or the LM with the layers of the path
    reader: Literal["lm", "path"] = "lm"
    # low-rank updates of the layers of the LM, or full copies of these layers
    layers: Literal["lora", "dense"] = "lora"
    dense_init: Literal["lm", "scratch"] = "lm"  # initial values of full copies: the weights of the LM, or random
    lora_rank: ranges.Width = 32  # rank of the low-rank updates
    lora_alpha: ranges.Scale = 32.0  # low-rank updates are scaled by lora_alpha / lora_rank
    classes: ranges.Classes = 0  # number of classes for classifier-free guidance; 0: no class embedding
    class_dropout: ranges.Dropout = 0.2  # probability, per position, of training on the null class

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.path")
        require(self.frequency_width % 2 == 0, f"config.path.frequency_width must be even, got {self.frequency_width}")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank updates of the weights of the LM, for `config.train.method="lora"` (Hu et al. 2021)."""

    rank: ranges.Width = 32  # rank of the updates
    alpha: ranges.Scale = 64.0  # updates are scaled by alpha / rank
    modules: tuple[str, ...] = ("q_proj", "v_proj")  # projections to update, by the names that PEFT uses

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.lora")
        for name in self.modules:
            problem = f"config.lora.modules has {name!r}, which is no layer of the LM"
            require(name in PROJECTIONS, f"{problem}{nearest(name, PROJECTIONS)}")
        rule = "config.lora.modules must name one or more layers, each once"
        require(0 < len(set(self.modules)) == len(self.modules), f"{rule}, got {self.modules}")


@dataclass(frozen=True)
class DataConfig:
    """Which conversations are read, and the fixed shape of their batches."""

    source: str = "smoltalk"  # "problems" (built in), "smoltalk", hub id of a data set, or folder or file of rows
    subsets: tuple[str, ...] = ()  # hub configurations, or folders, to join; (): the default of the source
    # share of each subset among the training rows, up to a factor; None: as many as each has
    weights: tuple[ranges.Scale, ...] | None = None
    data_dir: str | None = None  # folder with `<source>/<split>.jsonl` (or another format), read instead of the hub
    prepared: str | None = None  # folder written by `l2d prepare`, to read instead of the source; None: the source
    train_split: str = "train"  # name of the training split
    validation_split: str = "test"  # name of the validation split
    held_out: ranges.Share = 0.05  # share of rows to hold out if the source has only a training split; 0: none
    train_examples: ranges.Count | None = None  # largest number of training examples; None: all
    validation_examples: ranges.Count | None = 256  # largest number of held-out examples; None: all
    max_length: ranges.Length = 2048  # tokens of context and answer; longer examples are dropped and counted
    answer_length: ranges.Tokens | None = None  # positions per row that carry a loss; None: max_length
    working: ranges.Steps = 0  # steps in the column `working`, one target per evaluation; 0: the answer is the target
    empty_thoughts: bool = False  # close the thought that a prompt opens, as R1's do, if the answer has no thought
    packing: bool = False  # put several training examples in a row; False: one example per row, as in the paper
    seed: ranges.Seed = 0  # seed of the order of the examples

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.data")
        problem = f"config.data.answer_length {self.answer_length} exceeds config.data.max_length {self.max_length}"
        require((self.answer_length or 0) <= self.max_length, problem)
        rule = f"config.data.weights must be a number for each of config.data.subsets {self.subsets}"
        require(self.weights is None or 0 < len(self.weights) == len(self.subsets), f"{rule}, got {self.weights}")


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a warmup and a linear decay of the learning rate."""

    peak_rate: ranges.PeakRate = 1e-4  # learning rate after the warmup
    final_rate: ranges.FinalRate = 1e-6  # learning rate at the last step
    warmup_steps: ranges.CountOrZero = 100  # optimizer steps of the warmup
    # form of the rise in the warmup; "logarithmic": the whole schedule as in the authors' release
    warmup: Literal["linear", "logarithmic"] = "linear"
    beta1: ranges.Average = 0.9  # decay rate of the mean of gradients
    beta2: ranges.Average = 0.95  # decay rate of the mean of squared gradients
    epsilon: ranges.Epsilon = 1e-8  # term that Adam adds to the root of the mean of squared gradients
    weight_decay: ranges.WeightDecay = 0.01  # decay of matrices; biases and norms are not decayed
    clip_norm: ranges.Norm = 1.0  # largest norm of the whole gradient; a larger gradient is scaled down

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.optim")
        problem = f"config.optim.final_rate {self.final_rate} exceeds config.optim.peak_rate {self.peak_rate}"
        require(self.final_rate <= self.peak_rate, f"{problem}: lower it")


@dataclass(frozen=True)
class TrainConfig:
    """What is trained, for how long, and how often it is saved and measured."""

    # what to train: a path, updates of the layers of the LM, or all weights of the LM
    method: Literal["l2d", "lora", "full"] = "l2d"
    batch_size: ranges.Rows = 32  # rows per step, over all devices; a row is one example, or several if packed
    # micro-batches per step, whose gradients are averaged; "auto": as few as memory allows
    accumulation: ranges.Rows | Literal["auto"] = "auto"
    # share of positions where x_t shows the first estimate of the path, not the true token
    own_estimates: ranges.Share = 0.0
    draws_per_context: ranges.Draws = 1  # pairs of time and noise per position, which share one frozen pass
    time_density: Literal["uniform", "cosmap"] = "uniform"  # density that t is sampled from
    epochs: ranges.Epochs = 1.0  # passes over the training examples
    steps: ranges.Count | None = None  # optimizer steps; None: what `epochs` takes
    # mean over examples of their token means, or one mean over all tokens
    reduction: Literal["example", "token"] = "example"
    loss_chunk: ranges.Tokens = 1024  # positions whose logits each device holds at a time
    # what the backward pass recomputes: nothing, all but matrix products, or all; "auto": as little as memory allows
    remat: Literal["auto", "none", "products", "full"] = "auto"
    checkpoint_every: ranges.Count = 500  # optimizer steps between checkpoints
    checkpoint_minutes: ranges.Minutes = 0.0  # least time between two checkpoints; a save that is due sooner is skipped
    keep: ranges.Count = 3  # number of newest checkpoints to keep
    validate_every: ranges.CountOrZero = 500  # optimizer steps between validations; 0: only at the start and the end
    log_every: ranges.Count = 10  # optimizer steps between records of metrics
    # the run ends after this many updates in a row were skipped because a value was not finite
    max_skipped: ranges.Count = 10
    seed: ranges.Seed = 0  # seed of the initial values and the noise

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.train")
        problem = f"batch_size {self.batch_size} is not a multiple of config.train.accumulation {self.accumulation}"
        require(self.batch_size % self.micro_batches == 0, f"config.train.{problem}")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step; 1 where no plan has replaced "auto"."""
        return self.accumulation if isinstance(self.accumulation, int) else 1


@dataclass(frozen=True)
class DecodeConfig:
    """How the diffusion token is integrated, and how the next token is drawn (paper section 3.3)."""

    solver: SolverName = "midpoint"  # method that integrates the ODE
    budget: ranges.Budget = 15  # evaluations of the path per token, including the final one; adaptive solvers: at most
    end: ranges.End = 1.0  # t at which the ODE stops; adaptive solvers stop at 1 - 1/sigma at the latest
    tolerance: ranges.Tolerance = 3e-4  # relative and absolute error of the steps of an adaptive solver
    # estimate x̂: the vector of a sampled token, or the mean over all tokens
    velocity: Literal["sample", "expectation"] = "sample"
    velocity_temperature: ranges.Temperature = 0.0  # temperature of the estimate; 0: arg max
    anneal: bool = False  # let the temperature of the estimate fall linearly to 0 as t goes to 1
    guidance: ranges.Strength = 1.0  # strength w_g of a class label; 1: the class alone, 0: the null class
    temperature: ranges.Temperature = 0.0  # temperature of the tokens of the answer; 0: arg max
    top_k: ranges.CountOrZero = 0  # number of likeliest tokens to sample from; 0: all
    top_p: ranges.TopP = 1.0  # sample from the likeliest tokens that together reach this probability
    draws: ranges.Draws = 1  # noise samples per token; their mean distribution gives the answer
    gate: ranges.Nats = 0.0  # skip the ODE where the entropy of the LM alone is below this, in nats; 0: never
    # evaluations side by side: where that is faster, always, or never; check: like "on", but one accepted in each pass
    parallel: Literal["auto", "on", "off", "check"] = "auto"
    max_new_tokens: ranges.Tokens = 256  # largest number of tokens in an answer

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.decode")

    @property
    def must_be_parallel(self) -> bool:
        """Whether evaluations must go side by side, even where that is slower."""
        return self.parallel in ("on", "check")


@dataclass(frozen=True)
class ValidationConfig:
    """What is measured on held-out answers, during and after training."""

    batch_size: ranges.Rows = 8  # examples at a time
    time_bins: ranges.Bins = 10  # equal bins of t for the loss
    budgets: tuple[ranges.Budget, ...] = (1, 15)  # budgets at which accuracy is measured
    # held-out problems to answer at each budget, whose solutions are x or end in "#### x"; 0: none
    exact_examples: ranges.CountOrZero = 0
    exact_samples: ranges.CountOrZero = 0  # answers to each of these that are also sampled at temperature 1; 0: none
    exact_batch_size: ranges.Rows = 64  # answers decoded at a time
    # optimizer steps between answers to the first held-out example, which are printed in words; 0: none
    answer_every: ranges.CountOrZero = 0

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.validation")


@dataclass(frozen=True)
class MeshConfig:
    """Devices per mesh axis. One axis may be -1 or "auto": it takes the devices that the other axes leave."""

    data: ranges.MeshSize = 1  # copies of the weights
    fsdp: ranges.MeshSize | Literal["auto"] = "auto"  # shards of the weights; the batch is split over data x fsdp
    tensor: ranges.MeshSize = 1  # shards of attention heads and hidden units
    context: ranges.MeshSize = 1  # shards of the tokens of each sequence, for long sequences
    stationary: ranges.MeshSize = 1  # for decoding: shards of weights that stay in place; rows are gathered instead

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.mesh")
        sizes = [-1 if size == "auto" else size for size in vars(self).values()]
        rule = f"config.mesh takes positive sizes and at most one -1, got {', '.join(vars(self))} {sizes}"
        require(all(size == -1 or size > 0 for size in sizes) and sizes.count(-1) <= 1, rule)


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps of a run are traced for TensorBoard. Training does not depend on it."""

    steps: str | None = None  # "10:13": optimizer steps 10, 11 and 12, like a Python slice; never 1, which compiles

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.profile")
        found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", "2:3" if self.steps is None else self.steps)
        rule = "config.profile.steps must be FIRST:STOP with 1 < FIRST < STOP, such as 10:13"
        require(found is not None and 1 < int(found[1]) < int(found[2]), f"{rule}, got {self.steps!r}")


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go besides `metrics.jsonl` and TensorBoard. Training does not depend on it."""

    wandb: str | None = None  # project of Weights & Biases; None: no logging there

    def __post_init__(self) -> None:
        check_fields(self, prefix="config.log")


@dataclass(frozen=True)
class Config:
    """All options of one run."""

    model: ModelConfig
    path: PathConfig = field(default_factory=PathConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_conflicts(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Check names and types of a nested dictionary and build the config; raises `InputError`."""
        return from_dict(cls, values, prefix="config")

    def to_dict(self) -> dict[str, Any]:
        """A nested dictionary of plain values, which `from_dict` turns back and JSON can hold."""
        return asdict(self)


def defaults() -> ConfigDict:
    """All options with the values of the paper, for a config file to edit. Setting an unknown option is an error."""
    values = {name: {f.name: f.default for f in fields(section)} for name, section in get_type_hints(Config).items()}
    return ConfigDict(values, type_safe=False).lock()
