import argparse
import importlib
import re
import typing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from l2d_jax.command_line import Parser, local_path, number
from l2d_jax.config.config_file import read_config, split_overrides
from l2d_jax.config.schema import Config, DecodeConfig, OptimConfig, PathConfig, TrainConfig
from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture
from tests.support.programs import ROOT, call

CONFIG = """
from l2d_jax.config import defaults

def get_config():
    config = defaults()
    config.model.name = "org/model"
    config.model.architecture = {"vocab_size": 8, "rope_scaling": {"factor": 2.0}}
    return config

def wide(config):
    config.path.width = 512

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return path


def test_a_file_and_its_variant(file):
    assert read_config(str(file)).path.width == 256
    assert read_config(f"{file}:wide").path.width == 512


def test_a_variant_may_be_an_argument(file):
    file.write_text(CONFIG.replace("get_config()", "get_config(variant='none')").replace("org/model", "{variant}"))
    file.write_text(file.read_text().replace('"{variant}"', "variant"))
    assert read_config(str(file)).model.name == "none"
    assert read_config(f"{file}:anything").model.name == "anything"


@pytest.mark.parametrize(
    ("text", "variant", "message"),
    [
        (None, "", "no config file"),
        (CONFIG, ":wdie", "has no variant 'wdie': did you mean 'wide'?"),
        (CONFIG, ":NUMBER", "has no variant 'NUMBER'"),
        (CONFIG, ":defaults", "has no variant 'defaults'"),
        (CONFIG, ":get_config", "has no variant 'get_config'"),
        ("x = 1", "", "has no get_config()"),
        ("x = (", "", "fails: SyntaxError"),
        ("raise RuntimeError('two\\nlines')", "", "fails: RuntimeError: two lines"),
        ("def get_config(): return 1 / 0", "", "fails: ZeroDivisionError: division by zero"),
        ("def get_config(): return 3", "", "must return an ml_collections.ConfigDict, got int"),
        ("def get_config(): return {'model': 3}", "", "config.model must be a section"),
        (CONFIG.replace("width", "widht"), ":wide", 'Did you mean "width" instead of "widht"'),
    ],
)
def test_a_bad_file_is_one_line(file, text, variant, message):
    file.unlink() if text is None else file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_config(f"{file}{variant}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_python(file):
    renamed = file.rename(file.with_suffix(".yaml"))
    with pytest.raises(InputError, match=r"ends in \.py"):
        read_config(str(renamed))


def test_overrides(file):
    words = "--config.path.width=8 --config.data.source a --config.validation.budgets=(1,3) --config.train.steps=None"
    overrides = split_overrides(words.split())
    assert overrides == {"path.width": 8, "data.source": "a", "validation.budgets": (1, 3), "train.steps": None}
    config = read_config(f"{file}:wide", overrides)
    assert config.path.width == 8  # after the variant
    assert config.data.source == "a"
    nested = read_config(str(file), {"model.architecture.rope_scaling.factor": 4.0}).model.architecture
    assert nested == {"vocab_size": 8, "rope_scaling": {"factor": 4.0}}
    assert read_config(str(file), {"model.architecture": None}).model.architecture is None
    assert read_config(str(file), {"model.name": "a=b"}).model.name == "a=b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--config.path.widht=8", "unknown option config.path.widht: did you mean 'width'?"),
        ("--config.pth.width=8", "unknown option config.pth: did you mean 'path'?"),
        ("--config.path=8", "config.path is a section: set one of class_dropout"),
        ("--config.path.width.x=8", "unknown option config.path.width.x: it is below a plain value"),
        ("--config.path.width=eight", "config.path.width must be of type int, got 'eight'"),
        ("--config.path.width", "--config.path.width needs a value"),
        ("--config.model.architecture.vocab_sizes=9", "did you mean 'vocab_size'?"),
        ("--wokdir=x", "unknown argument '--wokdir=x'"),
        ("stray", "unknown argument 'stray'"),
    ],
)
def test_a_bad_override_is_one_line(file, words, message):
    def main():
        parser = Parser(prog="test")
        parser.add_argument("--config")
        parser.parse_with_config()

    assert message in call(main, "--config", file, *words.split()).error


class ParsedError(Exception):
    """Carries a program's parser out of its `main`."""


def options_of(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for chosen in action.choices.values():
                yield from options_of(chosen)
        else:
            yield action, parser._registry_get("type", action.type, action.type)


PROGRAMS = [
    file.stem for file in sorted((ROOT / "l2d_jax").glob("*.py")) if "command_line.run(main)" in file.read_text()
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_number_of_a_command_line_has_a_range(program, monkeypatch):
    def stop(parser, *_):
        raise ParsedError(parser)

    main = importlib.import_module(f"l2d_jax.{program}").main
    monkeypatch.setattr(Parser, "parse_known_args", stop)
    with pytest.raises(ParsedError) as caught:
        main()
    for action, kind in options_of(caught.value.args[0]):
        assert kind not in (int, float), action.option_strings
        if isinstance(kind, partial) and kind.func is number:
            of_type, interval = typing.get_args(*kind.args)
            assert action.default is None or all(kind(str(value)) == value for value in np.ravel(action.default))
            for text in (
                of_type(interval.ge - 1),
                of_type(2 * (interval.le or interval.lt)),
                "nan",
                "-inf",
                "",
                "9" * 5000,
            ):
                with pytest.raises(argparse.ArgumentTypeError, match="the number must be "):
                    kind(str(text))


def test_exit_statuses():
    def interrupted():
        raise KeyboardInterrupt

    def bad_input():
        raise InputError("two\nlines")

    assert call(lambda: None).status == 0
    assert call(lambda: 1).status == 1
    assert call(interrupted).status == 130
    assert call(bad_input).error == "two lines"


def test_bad_options_are_bad_input():
    def main():
        parser = Parser(prog="test")
        parser.add_argument("--budget", type=int, required=True)
        parser.parse_args()

    assert "required: --budget" in call(main).error
    assert "invalid int value: 'x'" in call(main, "--budget", "x").error
    assert "unrecognized arguments: --solver" in call(main, "--budget", "3", "--solver").error
    assert call(main, "--help").status == 0


def test_a_url_is_not_a_folder():
    def main():
        parser = Parser(prog="test")
        parser.add_argument("--workdir", type=local_path)
        assert parser.parse_args().workdir == Path("runs/a")

    assert call(main, "--workdir", "runs/a").status == 0
    assert "'gs://bucket/run' is not a path of this machine: copy" in call(main, "--workdir", "gs://bucket/run").error


FILES = sorted((ROOT / "configs").glob("*.py"))
MODELS = ["llama1b", "llama8b", "qwen1p5b", "qwen7b", "r1_qwen1p5b", "smollm2_135m"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_of_the_project_loads(path):
    variants = re.findall(r"^def (\w+)\(config", path.read_text(), re.MULTILINE)
    for reference in [str(path), *(f"{path}:{variant}" for variant in variants)]:
        config = read_config(reference)
        assert config.model.architecture is not None
        Architecture.from_hf(config.model.architecture)
        assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("name", MODELS)
def test_the_papers_configs_have_the_papers_values(name):
    file = ROOT / "configs" / f"{name}.py"
    config = read_config(str(file))
    path = {"width": 256, "frequency_width": 256, "condition_width": 256, "sigma": 64.0}
    assert config.path == PathConfig(**path, translation_width=256, layers="lora", lora_rank=32, lora_alpha=32.0)
    rates = {"peak_rate": 1e-4, "final_rate": 1e-6, "warmup_steps": 100}
    assert config.optim == OptimConfig(**rates, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
    train = {"batch_size": 32, "accumulation": "auto", "epochs": 1.0, "steps": None}
    assert config.train == TrainConfig(**train)
    assert config.data.source == "smoltalk"
    assert config.data.max_length == 2048
    assert config.decode == DecodeConfig(solver="midpoint", budget=15, velocity="sample", velocity_temperature=0.0)
    assert read_config(f"{file}:dense").path == PathConfig(layers="dense")
