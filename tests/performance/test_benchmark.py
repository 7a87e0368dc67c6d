"""The benchmarks run on tiny models and count what they say they count."""

import json
import time
from functools import partial

import jax
import pytest

from l2d_jax import benchmark
from l2d_jax.performance import timing, training_speed
from l2d_jax.performance.decoding_speed import bytes_per_evaluation
from l2d_jax.programs import benchmark as program
from tests.support import tiny
from tests.support.programs import call, options

SHAPE = ["--batches", 1, 2, "--budgets", 1, 5, "--prompt", 8, "--new", 4]


@pytest.mark.slow
def test_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_speed, "matrix_products", partial(timing.matrix_products, 256))
    shape = options(train__batch_size=2, data__max_length=64, data__answer_length=64)
    outcome = call(benchmark.main, "train", *shape, "--json")
    assert outcome.status == 0, outcome.err
    figures = json.loads(outcome.out)
    assert figures["tokens per second"] * figures["seconds per step"] == pytest.approx(2 * 64)
    assert figures["useful GFLOP/s"] > 0
    parts = figures["parts"]
    assert sum(part["seconds"] for part in parts.values()) == pytest.approx(figures["seconds per step"])
    flops = sum(part["FLOPs"] for part in parts.values())
    assert flops / figures["seconds per step"] / 1e9 == pytest.approx(figures["useful GFLOP/s"])
    assert [line.split("  ")[0] for line in program.training_table(figures)[-5:]] == list(parts)


@pytest.mark.slow
def test_a_path_that_reads_the_context_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_speed, "matrix_products", partial(timing.matrix_products, 256))
    shape = options(train__batch_size=1, data__max_length=32, data__answer_length=32, path__reader="path")
    outcome = call(benchmark.main, "train", *shape, "--json")
    assert outcome.status == 0, outcome.err
    assert list(json.loads(outcome.out)["parts"]) == ["all else"]


@pytest.mark.slow
def test_decoding() -> None:
    outcome = call(benchmark.main, "decode", *options(), *SHAPE, "--json")
    assert outcome.status == 0, outcome.err
    figures = json.loads(outcome.out)
    kinds = [(1, "one by one"), (5, "one by one"), (5, "side by side"), (5, "as a stream")]
    found = [(row["batch"], row["budget"], row["order"]) for row in figures["rows"]]
    assert found == [(batch, *kind) for batch in (1, 2) for kind in kinds]
    for row in figures["rows"]:
        assert row["tokens per second"] * row["seconds per token"] == pytest.approx(row["batch"])
        assert 1 <= row["passes per token"] <= 1 + row["budget"]
    lines = program.decoding_table(figures)
    assert len(lines) == 1 + 8 + 2 + 2


@pytest.mark.parametrize("layers", ["lora", "dense"])
def test_bytes_of_an_evaluation(layers: str) -> None:
    """Two layers of q, o and the MLP, their LoRA, and the head, in float32."""
    model = tiny.model("llama", layers=layers)
    weights = 2 * (2 * 32 * 32 + 3 * 32 * 48) + 96 * 32
    low_rank = 2 * 4 * (4 * 32 + 3 * (32 + 48)) if layers == "lora" else 0
    assert bytes_per_evaluation(model) == 4 * (weights + low_rank)


@pytest.mark.slow
def test_rates_are_those_of_this_machine() -> None:
    multiply, operations = timing.matrix_products(512)
    assert operations / timing.medians(multiply)[0] > 1e8
    assert timing.read_rate().rate > 1e8
    assert jax.default_backend() == "cpu"


def test_pieces_of_work_take_turns() -> None:
    turns: list[str] = []

    def nap() -> None:
        turns.append("long")
        time.sleep(len(turns) * 1e-3)

    short, long = timing.medians(lambda: turns.append("short"), nap)
    assert turns == ["short", "long"] * timing.REPEATS
    assert short < 1e-3 < 2e-3 * (timing.REPEATS // 2) < long  # the third of its naps, each longer than the one before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", 15], "--budgets needs two or more for a slope, got [15]"),
        (["--budgets", 1, 4], "a budget of 4 evaluations is unreachable for midpoint"),
        (["--config.decode.budget=7"], "--config.decode.budget changes nothing here: use --budgets"),
        (["--config.decode.max_new_tokens=7"], "--config.decode.max_new_tokens changes nothing here: use --new"),
        (["--config.decode.solver=fehlberg2"], "a time per evaluation needs a solver with fixed steps"),
        (["--batches", 0], "--batches: the number must be in [1, 1000000], got 0"),
        (["--new", 0], "--new: the number must be in [1, 10000000], got 0"),
    ],
)
def test_bad_requests_are_one_line(arguments, message) -> None:
    assert message in call(benchmark.main, "decode", *options(), *arguments).error
