"""What each program answers to what nobody should ask: one line, a status, and nothing written."""

import importlib

import pytest

from l2d_jax.distributed import memory
from l2d_jax.errors import LONGEST_LINE
from l2d_jax.weights import base_model
from tests.support.programs import TINY, call, write_base, write_tasks

LONG = "a" * 300  # one byte would be enough beyond 255
GENERATE = "--model BASE --prompt Hi"
EVALUATE = "--model BASE --tasks gsm8k --data_dir TASKS --out out"
TRAIN = f"--config {TINY} --workdir run"
STUDY = f"--config {TINY} --out out --models"
NUMBER = "the number must be in "
LACKING = "math (train test), instructhumaneval (test), mmlu_pro (validation test)"
FURTHER = "piqa (train validation), arc_easy (validation test), arc_challenge (validation test)"
LONG_NAME = "must be at most 255 bytes long, got 300"

# By program: what stands before all arguments, then arguments and a part of the line. "~" is a space in an argument.
TABLE = {
    "generate": (
        GENERATE,
        [
            ("--guidance nan", NUMBER),
            ("--guidance inf", NUMBER),
            ("--temperature inf", NUMBER),
            ("--temperature nan", NUMBER),
            ("--temperature -1", NUMBER),
            ("--temperature hot", "the number must be of type float, got 'hot'"),
            ("--budget 0", NUMBER),
            ("--budget 10001", NUMBER),
            ("--budget 1.5", "the number must be of type int, got '1.5'"),
            (f"--budget {'9' * 5000}", "the number must be of type int"),
            ("--max_new_tokens 0", NUMBER),
            ("--max_new_tokens 1000000000000", NUMBER),
            ("--seed -1", NUMBER),
            ("--seed 4294967296", NUMBER),
            ("--seed 18446744073709551616", NUMBER),
            ("--top_p 0", NUMBER),
            ("--top_p nan", NUMBER),
            ("--top_k -1", NUMBER),
            ("--top_k 3000000000", NUMBER),
            ("--draws 0", NUMBER),
            ("--draws 1000000", NUMBER),
            ("--gate nan", NUMBER),
            ("--gate -1", NUMBER),
            ("--tolerance 0", NUMBER),
            ("--tolerance inf", NUMBER),
            ("--end 0", NUMBER),
            ("--end 1.01", NUMBER),
            ("--end nan", NUMBER),
            ("--label -1", NUMBER),
            ("--label 99999999999999999999", NUMBER),
            ("--beams 0", NUMBER),
            ("--beams 1000000", NUMBER),
            ("--beams 2 --candidates 0", NUMBER),
            ("--beams 2 --candidates 99999999999", NUMBER),
            ("--beams 2 --length_power nan", NUMBER),
            ("--beams 2 --repetition_penalty inf", NUMBER),
            ("--beams 2 --final_temperature nan", NUMBER),
            ("--prompt \udcff", "must be UTF-8, got '\\udcff'"),
            ("--stop \udcff", "must be UTF-8"),
            (f"--trace {LONG}", LONG_NAME),
            ("--trace BASE/config.json/x", "cannot create a folder in"),
            ("--prompt a --unknown 3", "unrecognized arguments: --unknown 3"),
            (f"--prompt a --unknown {LONG}", "unrecognized arguments: --unknown aaa"),
        ],
    ),
    "generate from nowhere": (
        "--prompt Hi",
        [
            (f"--model {LONG}", LONG_NAME),
            ("--model x\0y", "must have no NUL character"),
            ("--model \udcff", "must be UTF-8"),
            ("--model", "expected one argument"),
            ("--model=", "the name is empty"),
            (f"--workdir {LONG}", LONG_NAME),
            (f"--workdir {'a/' * 2500}", "must be at most 4096 bytes long"),
            ("--workdir x\0y", "must have no NUL character"),
            ("--workdir gs:/bucket/run", "a folder in a bucket is gs://BUCKET/FOLDER, got 'gs:/bucket/run'"),
            ("", "one of the arguments --workdir --model is required"),
        ],
    ),
    "evaluate": (
        EVALUATE,
        [
            ("--name ../../x", "is no name of a file"),
            ("--name /tmp/x", "is no name of a file"),
            ("--name a/b", "is no name of a file"),
            ("--name ..", "is no name of a file"),
            ("--name .", "is no name of a file"),
            ("--name=", "the name is empty"),
            (f"--name {LONG}", LONG_NAME),
            ("--name x\0y", "must have no NUL character"),
            ("--limit 0", NUMBER),
            ("--limit -1", NUMBER),
            ("--shots -1", NUMBER),
            ("--samples 0", NUMBER),
            ("--samples 99999999", NUMBER),
            ("--batch_size 0", NUMBER),
            ("--batch_size 1000000000", NUMBER),
            ("--seed 18446744073709551616", NUMBER),
            ("--temperature inf", NUMBER),
            ("--guidance nan", NUMBER),
            ("--tolerance nan", NUMBER),
            ("--draws 1 --choices likelihood", NUMBER),
            ("--draws 100000", NUMBER),
            ("--budget 0", NUMBER),
            ("--max_new_tokens -1", NUMBER),
            ("--label -1", NUMBER),
            ("--label nobody", "--label"),
            ("--split ../../x", "is no name of a file"),
            (f"--split {LONG}", LONG_NAME),
            (f"--data_dir {LONG}", LONG_NAME),
            (f"--tasks {LONG}", "unknown task"),
            (f"--config {LONG}.py", "must be at most 255 bytes long, got 303"),
            ("--config x\0y.py", "must have no NUL character"),
            (f"--config {TINY} --config.decode.temperature=nan", "config.decode.temperature must be of type float"),
            (f"--config {TINY} --config.decode.temperature=1e999", "config.decode.temperature must be in [0, 1000]"),
            ("--config.decode.temperature=nan", "config.decode.temperature must be of type float"),
            ("--config.data.max_length=9", "--config.data.max_length changes nothing here"),
            (f"--config {TINY} --config.model.dtype=float32", "use --dtype"),
            ("--temperature 1 --config.decode.temperature=1", "are both given: leave one of them out"),
            ("--draws 4", "--draws needs --choices likelihood"),
            ("--beams 0", NUMBER),
            ("--beams 2 --total_budget 0", NUMBER),
            ("--beams 2 --final_temperature -1", NUMBER),
            ("--beams 17", "--batch_size 16 does not hold the 17 beams of a search: use 17 or more"),
            ("--beams 2 --tune search --tune_problems 0", NUMBER),
            ("--beams 2 --tune nothing", "invalid choice: 'nothing'"),
            ("--tolerance 0.1", "tolerance is an option of a diffusion path, and this model has none"),
            ("--suite paper", "argument --suite: not allowed with argument --tasks"),
            ("--data_dir BASE", "no split 'train' in "),
        ],
    ),
    "evaluate a suite": (
        "--model BASE --data_dir TASKS --out out",
        [
            ("", "one of the arguments --tasks --suite is required"),
            ("--suite mine", "argument --suite: invalid choice: 'mine'"),
            ("--suite paper", f"lacks rows of {LACKING}: put them there, as TASK/SPLIT.jsonl"),
            ("--suite all", f"lacks rows of {LACKING}, {FURTHER}: put them there, as TASK/SPLIT.jsonl"),
            ("--suite paper --shots 0", "lacks rows of math (test), instructhumaneval (test), mmlu_pro (test): put"),
            ("--tasks gsm8k,mmlu --split dev", "no split 'dev' in "),
            ("--tasks gsm8k,mmlu --split validation", "lacks rows of gsm8k (validation), mmlu (validation): put"),
        ],
    ),
    "sweep": (
        EVALUATE,
        [
            ("--strengths nan", NUMBER),
            ("--strengths 0 inf", NUMBER),
            ("--strengths 0 1", "give a --label"),
            ("--ends 0 1", NUMBER),
            ("--ends 0.5 nan", NUMBER),
            ("--ends 0.5 --config.decode.end=0.5", "--ends and config.decode.end both say where"),
            ("--name ../x", "is no name of a file"),
            ("--limit 0", NUMBER),
            ("--seed -1", NUMBER),
        ],
    ),
    "study": (
        STUDY,
        [
            ("../../x=BASE", "is not NAME=MODEL"),
            ("x", "is not NAME=MODEL"),
            (f"{LONG}=BASE", LONG_NAME),
            (f"a={LONG}", LONG_NAME),
            ("a=x\0y", "must have no NUL character"),
            ("a=BASE --budgets 0", NUMBER),
            ("a=BASE --budgets 1 10001", NUMBER),
            ("a=BASE --split ../x", "is no name of a file"),
            ("a=BASE --config.validation.time_bins=0", "config.validation.time_bins must be in [1, 10000], got 0"),
        ],
    ),
    "report": (
        "--workdir",
        [
            ("missing", "workdir missing has no validation and no evaluation"),
            (LONG, LONG_NAME),
            ("x\0y", "must have no NUL character"),
            ("BASE --beside missing", "missing"),
            (f"BASE --beside {LONG}", LONG_NAME),
        ],
    ),
    "convert": (
        "",
        [
            (f"import --base BASE --out {LONG}", LONG_NAME),
            ("import --base BASE --out x\0y", "must have no NUL character"),
            (f"import --base {LONG} --out out", LONG_NAME),
            ("import --base= --out out", "the name is empty"),
            ("import --base BASE --out BASE/config.json/x", "cannot create a folder in"),
            (f"import --base BASE --out out --adapter {LONG}", LONG_NAME),
            ("import --base BASE --out out --l2d x", "--l2d and --hyperparameters go together"),
            (f"export --model {LONG} --format hf --out out", LONG_NAME),
            ("export --model BASE --format nothing --out out", "invalid choice: 'nothing'"),
        ],
    ),
    "verify": (
        "",
        [
            ("--model BASE --against transformers --tokens -1", NUMBER),
            ("--model BASE --against transformers --tokens 0", NUMBER),
            (f"--model {LONG} --against transformers", LONG_NAME),
            (f"--model BASE --reference {LONG}", LONG_NAME),
        ],
    ),
    "benchmark": (
        f"decode --config {TINY}",
        [
            ("--batches 0", NUMBER),
            ("--batches 1 -1", NUMBER),
            ("--budgets 0 1", NUMBER),
            ("--prompt 1000000000000", NUMBER),
            ("--new 0", NUMBER),
            ("--config.path.width=0", "config.path.width must be in [1, 65536], got 0"),
            ("--workdir out --config.path.classes=4", "--config.path.classes changes nothing: a workdir has its own"),
        ],
    ),
    "compile": (
        f"--config {TINY} --topology v5e:1x1",
        [
            ("--slices 0", NUMBER),
            ("--slices 1000000000", NUMBER),
            ("--batch 0", NUMBER),
            ("--prompt -1", NUMBER),
            ("--top -1", NUMBER),
            (f"--hlo {LONG}", LONG_NAME),
            (f"--topology {LONG}", "aaa"),
        ],
    ),
    "train": (
        TRAIN,
        [
            ("--config.train.steps=1000000000000", "config.train.steps must be in [1, 1000000000]"),
            ("--config.train.steps=0", "config.train.steps must be in"),
            ("--config.optim.epsilon=0", "config.optim.epsilon must be in [1e-30, 1], got 0"),
            ("--config.optim.beta1=1.0", "config.optim.beta1 must be in [0, 0.999999], got 1.0"),
            ("--config.optim.beta2=-1", "config.optim.beta2 must be in"),
            ("--config.optim.peak_rate=1e400", "config.optim.peak_rate must be in [1e-12, 10], got inf"),
            ("--config.optim.peak_rate=nan", "config.optim.peak_rate must be of type float, got 'nan'"),
            ("--config.optim.clip_norm=0", "config.optim.clip_norm must be in"),
            ("--config.optim.weight_decay=-1", "config.optim.weight_decay must be in"),
            ("--config.path.width=1000000000", "config.path.width must be in"),
            ("--config.path.sigma=1e999", "config.path.sigma must be in"),
            ("--config.path.lora_alpha=1e999", "config.path.lora_alpha must be in"),
            ("--config.data.max_length=1000000000000", "config.data.max_length must be in"),
            ("--config.data.seed=-1", "config.data.seed must be in [0, 2147483648), got -1"),
            ("--config.train.seed=18446744073709551616", "config.train.seed must be in"),
            ("--config.train.seed=4294967296", "config.train.seed must be in"),
            ("--config.train.batch_size=1000000000000", "config.train.batch_size must be in"),
            ("--config.train.validate_every=-1", "config.train.validate_every must be in"),
            ("--config.validation.budgets=(1,0)", "config.validation.budgets[1] must be in"),
            (f"--config.train.steps=0x{'f' * 5000}", "config.train.steps must be in"),
            (f"--config.train.steps={'9' * 5000}", "config.train.steps must be of type int"),
            (f"--config.train.steps={'(' * 5000}", "config.train.steps must be of type int"),
            (f"--config.data.data_dir={LONG}", "config.data.data_dir must be at most 255 bytes"),
            ("--config.data.data_dir='x\\0y'", "config.data.data_dir must have no NUL character"),
            ("--config.data.data_dir='\\udcff'", "config.data.data_dir must be UTF-8"),
            (f"--config.model.name={LONG}", "config.model.name must be at most 255 bytes"),
            ("--config.path.width='\\d'", "config.path.width must be of type int"),
            (f"--config.{LONG}=1", "unknown option config.aaa"),
            ("--config.train.steps", "needs a value"),
            ("--config.profile.steps=10:99999999999", "config.profile.steps must be FIRST:STOP"),
            (f"--workdir {LONG}", LONG_NAME),
            ("--workdir x\0y", "must have no NUL character"),
            ("--workdir BASE/config.json", "config.json"),
            ("--workdir BASE/config.json/x", "config.json"),
            (f"--config {LONG}.py", "must be at most 255 bytes long, got 303"),
            (
                "--config missing.py",
                "no config file missing.py: give the path of a Python file with",
            ),
            ("--config \udcff.py", "must be UTF-8"),
        ],
    ),
}
ROWS = [(name, before, *row) for name, (before, rows) in TABLE.items() for row in rows]

# Sizes that fit their ranges, and no memory of a gibibyte.
LARGE = {
    "generate": (
        GENERATE,
        [
            ("--beams 60000 --candidates 300", "--beams, --candidates or --max_new_tokens"),
        ],
    ),
    "evaluate": (EVALUATE, [("--batch_size 1000000", "--batch_size or --max_new_tokens")]),
    "benchmark": (
        f"decode --config {TINY}",
        [("--batches 1 1000000", "--batches, --prompt or --new"), ("--new 10000000", "--batches, --prompt or --new")],
    ),
    "train": (
        TRAIN,
        [
            ("--config.path.width=65536 --config.path.translation_width=65536", "the sizes of config.path"),
            ("--config.data.max_length=10000000 --config.data.answer_length=10000000", "config.data.max_length"),
            ("--config.train.batch_size=1000000 --config.train.loss_chunk=10000000", "config.train.batch_size"),
        ],
    ),
}
LARGE_ROWS = [(name, before, *row) for name, (before, rows) in LARGE.items() for row in rows]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    return {"BASE": str(write_base(folder / "base")), "TASKS": str(write_tasks(folder / "tasks"))}


@pytest.fixture
def ask(places, tmp_path, monkeypatch):
    def ask(program, before, arguments, *, allowed=frozenset()):
        words = []
        for word in f"{before} {arguments}".split():
            for name, place in places.items():
                word = word.replace(name, place)
            words.append(word)
        main = importlib.import_module(f"l2d_jax.{program.split()[0]}").main
        outcome = call(main, *words)
        assert "Traceback" not in outcome.err
        assert len(outcome.error) <= LONGEST_LINE - len("error: ")
        files = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert {path.relative_to(here).parts[0] for path in files} <= allowed
        return outcome.error

    monkeypatch.setattr(base_model.BaseFiles, "load", None)
    here = tmp_path / "some" / "where"  # ../../x would be seen, too
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    return ask


@pytest.mark.parametrize(("program", "before", "arguments", "message"), ROWS)
def test_a_bad_invocation_is_one_line_and_writes_nothing(ask, program, before, arguments, message):
    assert message in ask(program, before, arguments)


@pytest.mark.parametrize(("program", "before", "arguments", "remedy"), LARGE_ROWS)
def test_what_cannot_fit_is_refused_with_the_figure(ask, monkeypatch, program, before, arguments, remedy):
    monkeypatch.setattr(memory, "device_bytes", lambda: 2**30)
    line = ask(program, before, arguments, allowed={"run"})
    assert "GiB of memory" in line
    assert "and the devices have 1.0 GiB: lower" in line
    assert remedy in line
