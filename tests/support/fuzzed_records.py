"""The files of what was measured, rows, and options: a small good one of each kind, and its readers."""

import json
import typing
from pathlib import Path
from typing import Any

from l2d_jax import command_line
from l2d_jax.config import config_file, ranges
from l2d_jax.config.schema import Config, DataConfig
from l2d_jax.data import rows, tokenizer
from l2d_jax.data.examples import Examples
from l2d_jax.evaluation.results import Results, Said, sample_line, summarise
from l2d_jax.evaluation.tasks.problem import Problem, Score
from l2d_jax.reports import evaluation, study, training
from l2d_jax.statistics import BootstrapSums
from l2d_jax.training.held_out.corrections import BINS, by_bin, value_names
from l2d_jax.training.metrics import Metrics, read_metrics
from tests.support import mutations, programs
from tests.support.fuzz import Kind, Values
from tests.support.fuzzed_models import MESSAGES, OPTIONS, flat

# What was measured


def _write_metrics(folder: Path) -> None:
    metrics = Metrics(folder, start=0, total=20)

    def validation(step: int) -> None:
        values: Values = {"validation/loss": 2.5 - step / 10, "validation/loss_by_t": [2.0, 2.5]}
        for kind in ("loss", "expected", "greedy"):
            for budget in (1, 3):
                name = f"validation/{kind}@{budget}"
                values |= {name: 0.5, f"{name}_interval": [0.4, 0.6], f"{name}_gain": [0.1, 0.0, 0.2]}
        metrics.write(step, values)

    validation(0)
    for step in range(1, 11):
        skipped = (
            {"skipped": 1} if step == 3 else {"loss": 2.0 / step, "learning_rate": 1e-4, "tokens_per_second": 99.5}
        )
        metrics.write(step, {"gradient_norm": 0.25, **skipped})
    validation(10)
    metrics.close()


def _read_metrics(folder: Path) -> Values:
    records = read_metrics(folder)
    before, after = training.first_and_last(folder)
    report = training.loss_rows(before, after), training.budget_rows(after)
    metrics = Metrics(folder, start=8, total=20)
    metrics.close()
    kept = read_metrics(folder)
    assert kept == [record for record in records if record["step"] <= 8]
    return {"records": records, "kept": kept, "report": report, "skipped": metrics.skipped}


RUN = {"task": "gsm8k", "split": "test", "model": "org/m", "dtype": "float32", "step": 7}
RUN |= {"fingerprint": {"weights": "ab" * 16, "problems": "cd" * 16}}
RUN |= {"decode": {"solver": "euler", "budget": 3, "guidance": 1.5}, "asking": {"label": 2, "samples": 2}}


def _write_results(folder: Path) -> None:
    results = Results(folder / "gsm8k" / "euler-3", RUN)
    for i in range(6):
        problem = Problem(f"gsm8k/test/{i}", ({"role": "user", "content": "?"},), "4", "4", "math", "ab"[i % 2])
        scores = [Score(float(i % 2), 1.0, "4", None, "wrong"), Score(float(i % 2), 1.0, "4", "4", "")]
        results.add([sample_line(problem, "a prompt", [Said("It's 5."), Said("It's 4.")], scores)])
    results.finish({"problems": 6, "tokens": 60, "seconds": 1.5, "tokens per second": 40.0})
    within = {"solver": "fehlberg2", "t": [0.0, 1.0], "greedy": [0.5, 0.75], "expected": [0.4, 0.7]}
    (folder / "gsm8k" / "within.json").write_text(json.dumps(within | {"evaluations": [3.0, 5.0]}))


def _read_samples(folder: Path) -> Values:
    samples = Results(folder / "gsm8k" / "euler-3", RUN).samples
    return {"records": list(samples.values()), "figures": summarise(samples) if samples else None}


def _write_study(folder: Path) -> None:
    sums = {f"{measure}@{key}": [1.0, 2.0] for measure in study.MEASURES for key in ("1", "euler-3")}
    sums |= {name: [0.0, 1.0] for name in value_names(["euler-3"])}
    answer = {"kind": "greedy", "budget": 3, "tries": 1, "right": [True, False], "tokens": 8.5, "flops": 1e9}
    settings = [
        {"key": "1", "solver": "", "evaluations": 1.0},
        {"key": "euler-3", "solver": "euler", "evaluations": 3.0},
    ]
    measured = {"about": {"step": 3}, "trained": 12, "settings": settings, "answers": [answer | {"seconds": 0.5}]}
    (folder / "lora.json").write_text(json.dumps(measured | {"tally": {"counts": [4.0, 6.0], "sums": sums}}))


def _read_study(folder: Path) -> Values:
    measured = {"lora": study.read_measurements(folder / "lora.json")}
    tally = BootstrapSums.join({name: one["tally"] for name, one in measured.items()})
    rows = [
        [*tally.mean(f"lora/{measure}@{one['key']}"), one["solver"], f"{one['evaluations']:.4g}"]
        for one in measured["lora"]["settings"]
        for measure in study.MEASURES
    ]
    changed = [by_bin(tally, kind, "euler-3", prefix="lora/") for kind in BINS]
    kept = {name: measured["lora"][name] for name in ("trained", "answers")}
    return {"rows": rows, "changed": changed, **kept}


def _read_results(folder: Path) -> Values:
    found = evaluation.collect(folder)
    table = evaluation.task_rows(found, {}) if found else None
    within = evaluation.collect_within(folder)
    Results(folder / "gsm8k" / "euler-3", RUN)
    keys = [(one.budget, one.run["decode"]["guidance"], one.run["asking"]["label"]) for one in found]
    return {"rows": table, "settings": keys, "within": within}


# Rows and options


def _write_rows(folder: Path) -> None:
    answers = [MESSAGES[1] | {"content": f"It's été, {i}\n"} for i in range(5)]
    written = [{"messages": [MESSAGES[0], answer], "class": i % 2} for i, answer in enumerate(answers)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))


def _read_data(folder: Path) -> Values:
    config = DataConfig(source=str(folder), train_examples=None)
    rows.keep_quiet()
    examples = Examples.load(config, tokenizer.byte_tokenizer(), split="train", classes=2)
    return {"rows": [examples.turns[int(number)]["tokens"].tolist() for number in examples.kept]}


def _write_overrides(folder: Path) -> None:
    values = {name: value for name, value in flat(programs.config()).items() if isinstance(value, int | float)}
    (folder / "options.json").write_text(json.dumps({k: v for k, v in values.items() if not isinstance(v, bool)}))


def _mutate_options(data: bytes, rng: Any) -> bytes:
    """One option of the command line, with another value."""
    name = rng.choice(list(json.loads(data)))
    return f"--config.{name}={rng.choice([*mutations.VALUES, 'nan', 'inf', '-inf', '1e400', '()', 'None'])}".encode()


def _read_overrides(folder: Path) -> Values:
    text = (folder / "options.json").read_text()
    given = [] if text.startswith("{") else [text]
    config = config_file.read_config(str(programs.TINY), config_file.split_overrides(given))
    assert Config.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    return flat(config)


def _write_number(folder: Path) -> None:
    (folder / "argument").write_text("Budget 15")


def _mutate_number(data: bytes, rng: Any) -> bytes:
    """A number of the command line, of any range that a program declares an option by."""
    texts = [*mutations.VALUES, "nan", "inf", "-inf", "1e400", "-0.0", "1_000", "0x10", "\u0663", " 7", "--help"]
    return f"{rng.choice(RANGES)} {rng.choice([*texts, str(rng.uniform(-2, 2) * 10 ** rng.randrange(30))])}".encode()


def _read_number(folder: Path) -> Values:
    declared, _, text = (folder / "argument").read_text().partition(" ")
    parser = command_line.Parser(prog="program", add_help=False)
    parser.add_argument("--number", type=declared)
    number = parser.parse_args([f"--number={text}"]).number
    assert isinstance(number, float) or abs(number) < 2**63
    return {"number": number, "kind": type(number).__name__}


RANGES = [name for name, declared in vars(ranges).items() if typing.get_origin(declared) is typing.Annotated]
RECORD_KINDS = {
    "metrics.jsonl": Kind(
        _write_metrics,
        "metrics.jsonl",
        mutations.of_lines,
        _read_metrics,
        dict.fromkeys(("records", "kept", "report", "skipped"), "a figure of a record: no checksum"),
    ),
    "samples.jsonl": Kind(
        _write_results,
        "gsm8k/euler-3/samples.jsonl",
        mutations.of_lines,
        _read_samples,
        dict.fromkeys(("records", "figures"), "a text or a score of a line: no checksum"),
    ),
    "results.json": Kind(
        _write_results,
        "gsm8k/euler-3/results.json",
        mutations.of_json_or_bytes,
        _read_results,
        {"rows": "a figure in range: no checksum"},
    ),
    "within.json": Kind(
        _write_results,
        "gsm8k/within.json",
        mutations.of_json_or_bytes,
        _read_results,
        {"within": "a figure in range: no checksum"},
    ),
    "study's NAME.json": Kind(
        _write_study,
        "lora.json",
        mutations.of_json_or_bytes,
        _read_study,
        dict.fromkeys(("rows", "changed", "trained", "answers"), "a figure in range: no checksum"),
    ),
    "rows (.jsonl)": Kind(
        _write_rows, "train.jsonl", mutations.of_lines, _read_data, {"rows": "a text or a class of someone's row"}
    ),
    "numbers of command lines": Kind(
        _write_number, "argument", _mutate_number, _read_number, {"number": "what the user says", "kind": "the same"}
    ),
    "options of a config": Kind(_write_overrides, "options.json", _mutate_options, _read_overrides, OPTIONS),
}
