import dataclasses
import json
import math
import types
import typing

import pytest
from annotated_types import Interval

from l2d_jax.config.parsing import check_value, from_dict, range_text
from l2d_jax.config.schema import (
    Config,
    DataConfig,
    DecodeConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PathConfig,
    ProfileConfig,
    TrainConfig,
    defaults,
)
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.errors import InputError

# Every option of the project: its type and default. A new one has to argue its case here.
OPTIONS = """
model.name: str = ''
model.tokenizer: str | None = None
model.chat_template: str | None = None
model.architecture: Mapping[str, Any] | None = None
model.dtype: Literal['bfloat16', 'float32', 'int8'] = 'bfloat16'
path.width: int in [1, 65536] = 256
path.translation_width: int in [1, 65536] = 256
path.frequency_width: int in [1, 65536] = 256
path.time_scale: float in [1e-06, 1000000.0] = 1.0
path.condition_width: int in [1, 65536] = 256
path.sigma: float in [1e-06, 1000000.0] = 64.0
path.start: Literal['released', 'anchored'] = 'released'
path.reader: Literal['lm', 'path'] = 'lm'
path.layers: Literal['lora', 'dense'] = 'lora'
path.dense_init: Literal['lm', 'scratch'] = 'lm'
path.lora_rank: int in [1, 65536] = 32
path.lora_alpha: float in [1e-06, 1000000.0] = 32.0
path.classes: int in [0, 4096] = 0
path.class_dropout: float in [0, 1) = 0.2
lora.rank: int in [1, 65536] = 32
lora.alpha: float in [1e-06, 1000000.0] = 64.0
lora.modules: tuple[str, ...] = ('q_proj', 'v_proj')
data.source: str = 'smoltalk'
data.subsets: tuple[str, ...] = ()
data.weights: tuple[float in [1e-06, 1000000.0], ...] | None = None
data.data_dir: str | None = None
data.prepared: str | None = None
data.train_split: str = 'train'
data.validation_split: str = 'test'
data.held_out: float in [0, 1] = 0.05
data.train_examples: int in [1, 1000000000] | None = None
data.validation_examples: int in [1, 1000000000] | None = 256
data.max_length: int in [2, 10000000] = 2048
data.answer_length: int in [1, 10000000] | None = None
data.working: int in [0, 9999] = 0
data.empty_thoughts: bool = False
data.packing: bool = False
data.seed: int in [0, 2147483648) = 0
optim.peak_rate: float in [1e-12, 10] = 0.0001
optim.final_rate: float in [0, 10] = 1e-06
optim.warmup_steps: int in [0, 1000000000] = 100
optim.warmup: Literal['linear', 'logarithmic'] = 'linear'
optim.beta1: float in [0, 0.999999] = 0.9
optim.beta2: float in [0, 0.999999] = 0.95
optim.epsilon: float in [1e-30, 1] = 1e-08
optim.weight_decay: float in [0, 100] = 0.01
optim.clip_norm: float in [1e-12, 1e+30] = 1.0
train.method: Literal['l2d', 'lora', 'full'] = 'l2d'
train.batch_size: int in [1, 1000000] = 32
train.accumulation: int in [1, 1000000] | Literal['auto'] = 'auto'
train.own_estimates: float in [0, 1] = 0.0
train.draws_per_context: int in [1, 4096] = 1
train.time_density: Literal['uniform', 'cosmap'] = 'uniform'
train.epochs: float in [1e-09, 1000000.0] = 1.0
train.steps: int in [1, 1000000000] | None = None
train.reduction: Literal['example', 'token'] = 'example'
train.loss_chunk: int in [1, 10000000] = 1024
train.remat: Literal['auto', 'none', 'products', 'full'] = 'auto'
train.checkpoint_every: int in [1, 1000000000] = 500
train.checkpoint_minutes: float in [0, 10000] = 0.0
train.keep: int in [1, 1000000000] = 3
train.validate_every: int in [0, 1000000000] = 500
train.log_every: int in [1, 1000000000] = 10
train.max_skipped: int in [1, 1000000000] = 10
train.seed: int in [0, 2147483648) = 0
decode.solver: Literal['euler', 'midpoint', 'heun', 'heun3', 'rk4', 'restart', \
'fehlberg2', 'adaptive_heun', 'bosh3'] = 'midpoint'
decode.budget: int in [1, 10000] = 15
decode.end: float in [1e-06, 1] = 1.0
decode.tolerance: float in [1e-12, 1000000.0] = 0.0003
decode.velocity: Literal['sample', 'expectation'] = 'sample'
decode.velocity_temperature: float in [0, 1000] = 0.0
decode.anneal: bool = False
decode.guidance: float in [-1000, 1000] = 1.0
decode.temperature: float in [0, 1000] = 0.0
decode.top_k: int in [0, 1000000000] = 0
decode.top_p: float in [1e-06, 1] = 1.0
decode.draws: int in [1, 4096] = 1
decode.gate: float in [0, 1000] = 0.0
decode.parallel: Literal['auto', 'on', 'off', 'check'] = 'auto'
decode.max_new_tokens: int in [1, 10000000] = 256
validation.batch_size: int in [1, 1000000] = 8
validation.time_bins: int in [1, 10000] = 10
validation.budgets: tuple[int in [1, 10000], ...] = (1, 15)
validation.exact_examples: int in [0, 1000000000] = 0
validation.exact_samples: int in [0, 1000000000] = 0
validation.exact_batch_size: int in [1, 1000000] = 64
validation.answer_every: int in [0, 1000000000] = 0
mesh.data: int in [-1, 1000000] = 1
mesh.fsdp: int in [-1, 1000000] | Literal['auto'] = 'auto'
mesh.tensor: int in [-1, 1000000] = 1
mesh.context: int in [-1, 1000000] = 1
mesh.stationary: int in [-1, 1000000] = 1
profile.steps: str | None = None
log.wandb: str | None = None
"""


def named(kind):
    """As the source has it, a number with its range."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return f"{named(options[0])} {range_text(options[1])}"
    if origin in (tuple, typing.Union, types.UnionType):
        names = ["..." if option is ... else named(option) for option in options]
        return f"tuple[{', '.join(names)}]" if origin is tuple else " | ".join(names)
    if kind is type(None):
        return "None"
    return kind.__name__ if isinstance(kind, type) and not options else str(kind)


def test_options_are_these():
    found = [
        f"{section}.{f.name}: {named(f.type)} = {f.default!r}"
        for section, options in typing.get_type_hints(Config).items()
        for f in dataclasses.fields(options)
    ]
    found = [line.replace("typing.", "").replace("collections.abc.", "") for line in found]
    assert found == OPTIONS.strip().splitlines()


SECTIONS = {**typing.get_type_hints(Config), "search": SearchConfig}


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_every_number_has_a_range_which_holds_however_it_is_set(section):
    for name, declared in typing.get_type_hints(section, include_extras=True).items():
        parts = (declared, *typing.get_args(declared))
        ranged = next((part for part in parts if typing.get_origin(part) is typing.Annotated), None)
        if ranged is None:
            assert not {int, float}.intersection(parts), name
            continue
        kind, interval = typing.get_args(ranged)
        low, high = interval.ge, interval.le or interval.lt
        assert -math.inf < low < high < math.inf, name
        for value in (kind(low - 1), kind(2 * high), math.nan, math.inf, -math.inf, 10**400):
            given = {name: (value,) if typing.get_origin(declared) is tuple else value}
            with pytest.raises(InputError, match=rf"some\.{name}(\[0\])? must be "):
                from_dict(section, given, prefix="some")
            if isinstance(value, kind):  # of another type, jaxtyping refuses it in tests
                with pytest.raises(InputError, match=rf"\.{name}(\[0\])? must be "):
                    section(**given)


@pytest.mark.parametrize(
    ("value", "declared", "message"),
    [
        (math.nan, float, "x must be finite, got nan"),
        (-math.inf, float, "x must be finite, got -inf"),
        (10**400, float, "x must be finite, got 1000"),
        (1.5, int, "x must be of type int, got 1.5 of type float"),
        pytest.param(10**5000, float, "x must be finite, got a int that cannot be written", id="long"),
        ("a" * 5000, float, f"x must be of type float, got '{'a' * 37} ... {'a' * 36}' of type str"),
        ("n\0l", str, r"x must have no NUL character, got 'n\x00l': leave it out"),
        ("\ud83d", str, r"x must be UTF-8, got '\ud83d'"),
        ("é" * 128, str, "x must be at most 255 bytes long, got 256"),
        ("a/" * 2049, str, "x must be at most 4096 bytes long, got 4098"),
    ],
)
def test_values_that_no_option_takes(value, declared, message):
    with pytest.raises(InputError) as caught:
        check_value(value, declared, "x")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_range_may_end_with_infinity():
    declared = typing.Annotated[float, Interval(gt=0, le=math.inf)]
    assert check_value(math.inf, declared, "x") == math.inf
    for value in (0.0, math.nan):
        with pytest.raises(InputError, match=r"x must be in \(0, inf\], got"):
            check_value(value, declared, "x")


def build(**sections):
    return Config.from_dict({"model": {"name": "org/model"}, **sections})


def test_defaults_build_once_a_model_is_named():
    config = defaults()
    with pytest.raises(InputError, match=r"config\.model\.name is empty"):
        Config.from_dict(config.to_dict())
    config.model.name = "org/model"
    assert Config.from_dict(config.to_dict()) == build()


def test_defaults_refuse_a_name_that_they_do_not_know():
    with pytest.raises(AttributeError, match='Did you mean "width"'):
        defaults().path.widht = 3


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"path": {"widht": 3}}, "unknown option config.path.widht: did you mean 'width'?"),
        ({"pth": {"width": 3}}, "unknown option config.pth: did you mean 'path'?"),
        ({"mesh": {"zzz": 3}}, "unknown option config.mesh.zzz: choose from context, data, fsdp, stationary, tensor"),
        ({"path": 3}, "config.path must be a section of options, got 3 of type int"),
        ({"path": None}, "config.path must be a section of options, got None"),
        ({"path": {"width": "wide"}}, "config.path.width must be of type int, got 'wide' of type str"),
        ({"path": {"width": 2.0}}, "config.path.width must be of type int, got 2.0 of type float"),
        ({"path": {"width": True}}, "config.path.width must be of type int, got True of type bool"),
        ({"path": {"sigma": True}}, "config.path.sigma must be of type float, got True"),
        ({"path": {"sigma": None}}, "config.path.sigma must be of type float, got None"),
        ({"data": {"packing": "yes"}}, "config.data.packing must be of type bool, got 'yes' of type str"),
        ({"decode": {"anneal": 1}}, "config.decode.anneal must be of type bool, got 1"),
        ({"train": {"steps": "all"}}, "config.train.steps must be of type int, got 'all'"),
        ({"train": {"accumulation": "all"}}, "config.train.accumulation must be a number or 'auto', got 'all'"),
        ({"train": {"accumulation": 2.0}}, "config.train.accumulation must be of type int, got 2.0 of type float"),
        ({"mesh": {"fsdp": "rest"}}, "config.mesh.fsdp must be a number or 'auto', got 'rest'"),
        ({"validation": {"budgets": 3}}, "config.validation.budgets must be of type tuple[int, ...], got 3"),
        ({"validation": {"budgets": [1, "x"]}}, "config.validation.budgets[1] must be of type int, got 'x'"),
        ({"path": {"layers": "loar"}}, "config.path.layers must be one of 'lora', 'dense', got 'loar'"),
        ({"train": {"method": "qlora"}}, "config.train.method must be one of 'l2d', 'lora', 'full', got 'qlora'"),
        ({"train": {"method": "full"}, "model": {"name": "a", "dtype": "int8"}}, "which config.model.dtype 'int8' fre"),
        (
            {"train": {"method": "lora", "draws_per_context": 2}},
            "trains no diffusion path, and config.train.own_estimates 0.0, draws_per_context 2",
        ),
        (
            {"train": {"own_estimates": 0.5}, "data": {"working": 3}},
            "own_estimates 0.5 shows estimates of the answer, and",
        ),
        (
            {"train": {"time_density": "cosine"}},
            "config.train.time_density must be one of 'uniform', 'cosmap', got 'cosine'",
        ),
        ({"decode": {"anneal": "yes"}}, "config.decode.anneal must be of type bool, got 'yes'"),
        ({"model": {"name": "a", "dtype": "float16"}}, "config.model.dtype must be one of 'bfloat16', 'float32'"),
        ({"model": {"name": "random"}}, "config.model.architecture is None: give the keys of a config.json"),
        ({"model": {"name": "a", "architecture": 3}}, "config.model.architecture must be of type"),
    ],
)
def test_bad_values_are_named(sections, message):
    with pytest.raises(InputError) as caught:
        build(**sections)
    assert message in str(caught.value)


def test_a_missing_section_is_named():
    with pytest.raises(InputError, match=r"option config\.model is missing"):
        Config.from_dict({})


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (PathConfig, {"frequency_width": 3}, "must be even, got 3"),
        (LoraConfig, {"modules": ("q_prj",)}, "has 'q_prj', which is no layer of the LM: did you mean 'q_proj'"),
        (LoraConfig, {"modules": ()}, "one or more layers, each once"),
        (LoraConfig, {"modules": ("q_proj", "q_proj")}, "each once, got"),
        (DataConfig, {"answer_length": 4000}, "4000 exceeds config.data.max_length 2048"),
        (OptimConfig, {"peak_rate": 1e-5, "final_rate": 1e-4}, "exceeds config.optim.peak_rate 1e-05"),
        (TrainConfig, {"accumulation": 3}, "batch_size 32 is not a multiple of config.train.accumulation 3"),
        (DecodeConfig, {"budget": 0}, r"config.decode.budget must be in \[1, 10000\], got 0"),
        (MeshConfig, {"data": -1}, "at most one -1"),
        (MeshConfig, {"data": 0}, "positive sizes"),
        (ProfileConfig, {"steps": "10"}, "FIRST:STOP with 1 < FIRST < STOP, such as 10:13, got '10'"),
        (ProfileConfig, {"steps": "1:3"}, "1 < FIRST"),
        (ProfileConfig, {"steps": "13:13"}, "FIRST < STOP"),
        (ProfileConfig, {"steps": ""}, "got ''"),
        (ModelConfig, {}, "config.model.name is empty"),
    ],
)
def test_values_are_checked_on_construction(kind, values, message):
    with pytest.raises(InputError, match=message):
        kind(**values)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"path": {"dense_init": "scratch"}}, "there is no from-scratch LoRA: set layers to 'dense'"),
        ({"path": {"class_dropout": 0.1}}, "class_dropout 0.1 drops classes, but config.path.classes is 0"),
        ({"decode": {"guidance": 2.0}}, "guidance 2.0 is the strength of a class, but config.path.classes is 0"),
        (
            {"path": {"classes": 4, "class_dropout": 0.0}, "decode": {"guidance": 1.5}},
            "guidance 1.5 mixes in the null class, which is never trained with config.path.class_dropout 0",
        ),
        ({"data": {"source": "problems", "data_dir": "rows"}}, "config.data.source 'problems' is built in, but"),
        ({"data": {"validation_split": "train"}}, "validation_split are both 'train': held-out answers need"),
        ({"decode": {"anneal": True}}, "velocity_temperature fall to 0, but it is 0 already"),
        ({"decode": {"velocity": "expectation"}}, "'expectation' is the arg max where config.decode.velocity_temp"),
    ],
)
def test_contradictions_are_refused(sections, message):
    with pytest.raises(InputError) as caught:
        build(**sections)
    assert message in str(caught.value)
    assert "{" not in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"path": {"layers": "dense", "dense_init": "scratch", "lora_rank": 16}},
        {"path": {"classes": 4, "class_dropout": 0.0}},
        {"path": {"classes": 4, "class_dropout": 0.1}, "decode": {"guidance": 0.0}},
        {"decode": {"velocity": "expectation", "velocity_temperature": 1.0, "anneal": True}},
    ],
)
def test_what_goes_together_is_taken(sections):
    build(**sections)


def test_values_are_cast_where_nothing_is_lost():
    config = build(path={"sigma": 32}, validation={"budgets": [1, 3]}, data={"subsets": ["a"]}, train={"steps": None})
    assert (config.path.sigma, type(config.path.sigma)) == (32.0, float)
    assert config.validation.budgets == (1, 3)
    assert config.data.subsets == ("a",)
    assert config.train.steps is None


def test_the_resolved_config_survives_json():
    config = build(data={"subsets": ("a", "b")}, model={"name": "random", "architecture": {"rope": {"factor": 2.0}}})
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
