"""Variants: the shared ones and a file's own, several at a time, and the table of what they train."""

from itertools import permutations

import pytest

from l2d_jax import train
from l2d_jax.config.config_file import VARIANTS, find_variants, read_config
from l2d_jax.config.schema import CATEGORIES, Config
from l2d_jax.errors import InputError
from l2d_jax.files import package_table
from l2d_jax.model.architecture import Architecture
from l2d_jax.performance.costs import trainable_parameters
from tests.support.programs import ROOT, call

FILES = {file.stem: str(file) for file in sorted((ROOT / "configs").glob("*.py"))}
SHARED = list(package_table(VARIANTS))
LLAMA1B = FILES["llama1b"]
TRAINED = {  # of Llama 1B; less 240 columns, rows and biases around the token for width 16, and five classes of 256
    "dense": 992_945_408,
    "dense_scratch": 992_945_408,
    "width_16": 73_344_256 - 240 * 2048 - 240 - 240 * 256,
    "guidance": 73_344_256 + 5 * 256,
    "reading": 73_344_256 + 16 * 2 * (2048 * 32 + 32 * 512),
    "lora": 3_407_872,
    **dict.fromkeys(("full", "full_3e5", "full_1e4"), 1_235_814_400),
}

SLICES = """
import importlib.util

spec = importlib.util.spec_from_file_location("llama1b", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
get_config = module.get_config

def v5e_1x1(config):
    config.train.remat = "none"

def v5p_2x2x1(config):
    config.train.accumulation = 2

def v6e_1x1(config):
    config.train.accumulation = 16
"""

OWN = """
from l2d_jax.config import defaults

def get_config():
    config = defaults()
    config.model.name = "org/model"
    return config

def quiet(config):
    config.path.sigma = 8.0
    config.path.width = 8

def dense(config):
    config.path.width = 4

def _hidden(config):
    pass
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "config.py").write_text(OWN)
    return tmp_path / "config.py"


@pytest.fixture
def slices(tmp_path):
    """Llama 1B with variants of its own."""
    (tmp_path / "slices.py").write_text(SLICES.format(file=LLAMA1B))
    return tmp_path / "slices.py"


def trained(reference):
    config = read_config(reference)
    return trainable_parameters(config, Architecture.from_hf(config.model.architecture))


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_variant_of_every_model_resolves(name):
    found = find_variants(FILES[name])
    assert set(SHARED) <= found.keys()
    for variant in found:
        config = read_config(f"{FILES[name]}:{variant}")
        assert config != read_config(FILES[name]) or (name, variant) == ("tiny", "width_16"), "it changes nothing"
        assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("variant", SHARED)
def test_trainable_parameters(variant):
    assert trained(f"{LLAMA1B}:{variant}") == TRAINED.get(variant, trained(LLAMA1B))


def test_shared_variants_say_what_they_are():
    for name in SHARED:
        words = package_table(VARIANTS)[name]["says"]
        assert words.endswith(".")
        assert "\n" not in words


def test_full_finetuning_has_the_papers_three_rates():
    for variant, rate in {"full": 1e-5, "full_3e5": 3e-5, "full_1e4": 1e-4}.items():
        config = read_config(f"{LLAMA1B}:{variant}")
        assert (config.train.method, config.optim.peak_rate, config.optim.final_rate) == ("full", rate, 1e-6)


def test_r1_keeps_the_thoughts_of_its_rows_unless_they_have_none():
    name = FILES["r1_qwen1p5b"]
    assert not read_config(name).data.empty_thoughts
    assert read_config(f"{name}:empty_thoughts").data.empty_thoughts
    assert read_config(f"{name}:empty_thoughts,lora").train.method == "lora"


def test_guidance_has_the_classes_of_the_evaluation():
    path = read_config(f"{LLAMA1B}:guidance").path
    assert (path.classes, path.class_dropout) == (len(CATEGORIES), 0.2)


def test_several_are_applied_in_order(file, slices):
    config = read_config(f"{slices}:dense_scratch,v5p_2x2x1, sigma_128")
    assert (config.path.layers, config.path.dense_init, config.path.sigma) == ("dense", "scratch", 128.0)
    assert config.train.accumulation == 2
    assert read_config(f"{file}:quiet,sigma_32").path.sigma == 32.0
    assert read_config(f"{file}:sigma_32,quiet").path.sigma == 8.0
    assert read_config(f"{file}:sigma_32,quiet", {"path.sigma": 3.0}).path.sigma == 3.0


def test_those_that_do_not_meet_may_come_in_any_order():
    names = ("dense", "width_16", "rate_1e5", "guidance")
    assert len({str(read_config(f"{LLAMA1B}:{','.join(order)}")) for order in permutations(names)}) == 1


def test_a_files_own_goes_first(file):
    assert read_config(f"{file}:dense").path.width == 4
    assert read_config(f"{file}:dense").path.layers == "lora"
    assert read_config(f"{file}:dense_scratch").path.layers == "dense"


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("sigma_32,sigma_128", "the variants sigma_32 and sigma_128 both set config.path.sigma: choose one"),
        ("rate_3e5,quiet,rate_1e5", "the variants rate_3e5 and rate_1e5 both set config.optim.peak_rate"),
        ("quite", "has no variant 'quite': did you mean 'quiet'?"),
        ("quiet,dense_scrach", "has no variant 'dense_scrach': did you mean 'dense_scratch'?"),
        ("zzz", "choose from anchored, cosmap, dense, dense_scratch, full, full_1e4, full_3e5, guidance"),
        ("_hidden", "has no variant '_hidden'"),
        ("ConfigDict", "has no variant 'ConfigDict'"),
        ("quiet,", "has no variant ''"),
    ],
)
def test_bad_variants_are_one_line(file, variant, message):
    with pytest.raises(InputError) as caught:
        read_config(f"{file}:{variant}")
    assert message in str(caught.value)


def test_the_table_counts_each(file, slices):
    outcome = call(train.main, "--config", f"{slices}:v6e_1x1,sigma_32", "--variants")
    assert outcome.status == 0, outcome.err
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in outcome.out.splitlines()}
    assert rows["-"][0] == "73,344,256"
    assert rows["dense"] == ["992,945,408", package_table(VARIANTS)["dense"]["says"]]
    assert rows["sigma_128"][0] == "refused"
    assert "sigma_32 and sigma_128 both set" in rows["sigma_128"][1]
    assert rows.keys() - set(SHARED) == {"variant", "-", "v5e_1x1", "v5p_2x2x1"}
    assert "sigma_32" not in rows
    assert "no config file" in call(train.main, "--config", f"{file}.py", "--variants").error
