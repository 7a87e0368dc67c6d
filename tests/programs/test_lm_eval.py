"""The program, on tasks of a few rows each; and what it says where lm-evaluation-harness is missing."""

import importlib.util
import json
import math
import sys

import pytest

import l2d_jax.lm_eval as program  # the program; lm_eval alone is the harness
from l2d_jax.config.schema import PathConfig
from l2d_jax.weights import model_folder
from tests.support.programs import call, open_base, write_base

needs_it = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness: the extra lm-eval"
)
SMALL = PathConfig(width=8, translation_width=8, frequency_width=8, condition_width=8, lora_rank=2, lora_alpha=2.0)
ANSWERS = [{"question": f"{i} + {i} =", "answer": f"{2 * i}"} for i in range(5)]
CHOICES = [{"question": f"{i} + 1 =", "choices": [" 1", " 2", " 12"], "label": i % 3} for i in range(3)]
TEXTS = [{"text": "A text of its own."}, {"text": "Another one."}]
HEAD = "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
METRIC = "metric_list: [{{metric: {metric}, aggregation: {how}, higher_is_better: true}}]\n"
ASKED = HEAD + "doc_to_text: '{{{{question}}}}'\n" + METRIC
TASKS = {
    "tiny_answers": ANSWERS,
    "tiny_choices": CHOICES,
    "tiny_texts": TEXTS,
    "tiny_code": ANSWERS,
    "tiny_beams": ANSWERS,
    "tiny_lost": ANSWERS,
}
GENERATION = "output_type: generate_until\ndoc_to_target: '{{answer}}'\n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of task files."""
    folder = tmp_path_factory.mktemp("tasks")

    def write(name, template, rest, **fields):
        file = folder / f"{name}.jsonl"
        if name != "tiny_lost":
            file.write_text("".join(json.dumps(row) + "\n" for row in TASKS[name]))
        (folder / f"{name}.yaml").write_text(template.format(name=name, rows=file, **fields) + rest)

    short = GENERATION + "generation_kwargs: {until: ['e'], max_gen_toks: 6, do_sample: false}\n"
    exact = {"metric": "exact_match", "how": "mean"}
    write("tiny_answers", ASKED, short, **exact)
    choice = "output_type: multiple_choice\ndoc_to_choice: '{{choices}}'\ndoc_to_target: label\n"
    write("tiny_choices", ASKED, choice, metric="acc", how="mean")
    rolling = "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    write("tiny_texts", HEAD + METRIC, rolling, metric="byte_perplexity", how="weighted_perplexity")
    write("tiny_code", ASKED, short + "unsafe_code: true\n", **exact)
    write("tiny_beams", ASKED, GENERATION + "generation_kwargs: {num_beams: 4}\n", **exact)
    write("tiny_lost", ASKED, short, **exact)
    (folder / "tiny_group.yaml").write_text("group: tiny_group\ntask: [tiny_answers, tiny_choices]\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, mesh):
    """A model folder with a path."""
    folder = write_base(tmp_path_factory.mktemp("model") / "model")
    llm = open_base(model_folder.ModelConfig(name=str(folder), dtype="float32"), mesh).llm
    model_folder.save_path(folder, model_folder.new_path(SMALL, llm, mesh, seed=0), base=str(folder))
    return folder


def leave_others(monkeypatch):
    """Leave out the harness's own tasks, whose names take several seconds to read."""
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **given: manager(**given | {"include_defaults": False}))


@pytest.fixture
def no_others(monkeypatch):
    leave_others(monkeypatch)


def run(out, folder, *arguments):
    return call(program.main, "--include_path", folder, "--out", out, *arguments)


def read(out):
    """The results, and the samples of each task."""
    [results] = out.rglob("results_*.json")
    files = {file.name.split("_20")[0].removeprefix("samples_"): file for file in out.rglob("samples_*.jsonl")}
    samples = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    return json.loads(results.read_text()), samples


@needs_it
def test_tasks_of_every_kind(tmp_path, tasks, model, monkeypatch):
    names = list(TASKS)[:3]
    arguments = ["--model", model, "--draws", 2, "--limit", 2, "--dtype", "float32", "--batch_size", 2]
    outcome = run(tmp_path / "out", tasks, *arguments, "--tasks", ",".join(names), "--budget", 3)
    assert outcome.status == 0, outcome
    for name in (*names, "exact_match", "acc", "byte_perplexity"):
        assert name in outcome.out
    results, samples = read(tmp_path / "out")
    assert results["config"]["settings"]["budget"] == results["config"]["scoring"]["budget"] == 3
    assert results["config"]["model_args"]["likelihood"] == "path"
    assert results["config"]["draws"] == results["config"]["batch_size"] == 2
    assert results["results"]["tiny_choices"]["acc,none"] in (0, 0.5, 1)
    perplexity = results["results"]["tiny_texts"]["byte_perplexity,none"]
    assert {name: len(rows) for name, rows in samples.items()} == dict.fromkeys(names, 2)
    total = sum(float(sample["resps"][0][0]) for sample in samples["tiny_texts"])
    length = sum(len(row["text"]) for row in TEXTS)
    assert perplexity == pytest.approx(math.exp(-total / length), rel=1e-5)

    leave_others(monkeypatch)
    base = run(tmp_path / "base", tasks, *arguments, "--tasks", "tiny_choices", "--likelihood", "base")
    assert base.status == 0, base
    config = read(tmp_path / "base")[0]["config"]
    assert (config["settings"]["budget"], config["scoring"]["budget"]) == (15, 1)


@needs_it
def test_a_group_of_conversations(tmp_path, tasks, model, no_others):
    arguments = ["--model", model, "--tasks", "tiny_group", "--apply_chat_template", "--limit", 1, "--budget", 1]
    outcome = run(tmp_path / "out", tasks, *arguments, "--dtype", "float32", "--batch_size", 2)
    assert outcome.status == 0, outcome
    assert "tiny_choices" in outcome.out
    [sample] = read(tmp_path / "out")[1]["tiny_answers"]
    assert sample["arguments"]["gen_args_0"]["arg_0"] == "<|im_start|>user\n0 + 0 =<|im_end|>\n<|im_start|>assistant\n"


@needs_it
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tasks", "tiny_code"],
            "the harness cannot run tiny_code: Attempted to run task: tiny_code which is",
        ),
        (["--tasks", "tiny_beams"], "the task's generation option num_beams is not known here: leave it out"),
        (["--tasks", "tiny_lost"], "the harness cannot run tiny_lost: Unable to find "),
        (["--tasks", "tiny_?"], "the harness cannot run tiny_?: Tasks not found: tiny_?"),
        (["--tasks", "tiny_texts", "--colour", "red"], "unrecognized arguments: --colour red (--help lists"),
        (["--tasks", "tiny_texts", "--verbosity"], "argument --verbosity/-v: expected one argument"),
        (["--tasks", "tiny_texts", "--budget", "4"], "a budget of 4 evaluations is unreachable"),
        (["--tasks", "tiny_texts", "--draws", "1"], "argument --draws: the number must be in [2, 4096], got 1"),
        (
            ["--tasks", "tiny_texts", "--batch_size", "0"],
            "argument --batch_size: the number must be in [1, 1000000]",
        ),
        (["--tasks", "tiny_texts", "--limit", "0"], "argument --limit: the number must be in [1, 1000000000], got 0"),
        (
            ["--tasks", "tiny_texts", "--max_new_tokens", "0"],
            "argument --max_new_tokens: the number must be in",
        ),
    ],
)
def test_bad_input(tmp_path, tasks, model, arguments, message):
    outcome = run(tmp_path / "out", tasks, "--model", model, *arguments)
    assert outcome.status == 2
    assert outcome.err.splitlines()[-1].startswith(f"error: {message}")  # behind the progress of reading data
    assert not (tmp_path / "out").exists()


def test_without_the_harness(tmp_path, monkeypatch):
    for name in [
        name for name in sys.modules if name.split(".")[0] == "lm_eval" or name == "l2d_jax.evaluation.lm_eval_model"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    outcome = run(tmp_path / "out", tmp_path, "--model", "anything", "--tasks", "piqa")
    assert outcome.error.endswith("pip install '.[lm-eval]'")
