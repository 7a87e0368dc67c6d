"""Guidance from end to end on the tiny model: classes from the data's sources, training, and strengths to compare."""

import dataclasses
import json

import datasets
import pytest

from l2d_jax import evaluate, sweep, train
from l2d_jax.config.schema import CATEGORIES
from l2d_jax.data import tokenizer
from l2d_jax.loading import load
from tests.support.programs import TINY, call, options, write_tasks
from tests.support.requests import score

pytestmark = pytest.mark.slow  # a path is trained first
SUBSETS = {"metamathqa-50k": "math", "self-oss-instruct": "coding"}


def answer_of(category):
    return 8 * category[0].upper()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of two of SmolTalk's subsets, with answers that tell them apart."""
    folder = tmp_path_factory.mktemp("data")
    for name, category in SUBSETS.items():
        (folder / "smoltalk" / name).mkdir(parents=True)
        row = {
            "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer_of(category)}],
        }
        for split, count in (("train", 8), ("test", 1)):
            (folder / "smoltalk" / name / f"{split}.jsonl").write_text(count * (json.dumps(row) + "\n"))
    return write_tasks(folder)


@pytest.fixture(scope="module")
def words(folder):
    """The command line of training, but for the workdir."""
    data = {"data__source": "smoltalk", "data__data_dir": folder, "data__validation_split": "test"}
    small = {"data__max_length": 64, "data__answer_length": 16, "train__steps": 160}
    small |= {"train__log_every": 40, "train__checkpoint_every": 160}
    small |= {"optim__peak_rate": 0.03, "optim__final_rate": 0.01, "path__sigma": 1.0, "train__batch_size": 8}
    return ["--config", f"{TINY}:guidance", *options(**data, **small, data__subsets=tuple(SUBSETS))[2:]]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        workdir = tmp_path_factory.mktemp("run") / "run"
        outcome = call(train.main, *words, "--workdir", workdir)
        assert (outcome.status, outcome.err) == (0, "")
        assert "training examples: 16 (" in outcome.out
    return workdir


def test_each_class_pulls_towards_its_own_answers(workdir):
    """The prompt is the same in both sources: nothing else than the class tells the path which answer comes."""
    loaded = load(workdir)
    assert loaded.model.path.config.classes == len(CATEGORIES)
    question = tokenizer.prompt_ids([{"role": "user", "content": "?"}], loaded.tokenizer)
    answers = [tokenizer.text_ids([answer_of(category)], loaded.tokenizer)[0] for category in SUBSETS.values()]

    def lead(category, strength):
        """By how much the answer of mathematics is likelier than that of code."""
        mean = {"velocity": "expectation", "velocity_temperature": 1.0}
        settings = dataclasses.replace(loaded.defaults, budget=3, guidance=strength, **mean)
        labels = 2 * [CATEGORIES.index(category)]
        math, code = score(loaded, [question] * 2, answers, settings=settings, labels=labels, draws=8)
        return math.total - code.total

    assert lead("math", 1.0) > 1 > -1 > lead("coding", 1.0)
    assert len({lead("math", strength) for strength in (0.0, 1.0, 2.0)}) == 3


def test_strengths_compare(workdir, folder):
    tasks = ["--workdir", workdir, "--tasks", "gsm8k", "--data_dir", folder, "--limit", 2, "--shots", 1]
    outcome = call(
        sweep.main,
        *tasks,
        "--max_new_tokens",
        4,
        "--budget",
        3,
        "--label",
        "category",
        "--strengths",
        0,
        2,
        "--ends",
        1,
    )
    assert outcome.status == 0, outcome.err
    found = {folder.name for folder in (workdir / "eval" / "gsm8k").iterdir() if folder.is_dir()}
    assert found == {f"midpoint-3-label_category-{strength}" for strength in (0, 1, 2)}
    assert (workdir / "eval" / "guidance.png").read_bytes().startswith(b"\x89PNG")


def test_a_class_beyond_those_of_the_path_is_refused(workdir, folder):
    tasks = ["--workdir", workdir, "--tasks", "gsm8k", "--data_dir", folder, "--shots", 1, "--budget", 3]
    assert "class label 4 is unknown to this path: it knows 0 to 3" in call(evaluate.main, *tasks, "--label", 4).error


def test_rows_without_classes_are_refused_before_training(words, folder, tmp_path):
    (folder / "plain").mkdir()
    for split in ("train", "test"):
        (folder / "plain" / f"{split}.jsonl").write_text('{"question": "?", "answer": "7"}\n')
    changed = ["--config.data.source=plain", "--config.data.subsets=()", "--workdir", tmp_path / "run"]
    error = call(train.main, *words, *changed).error
    assert "guidance needs the class of each row, but those of plain/train have none: add a column 'class'" in error
    assert not (tmp_path / "run" / "checkpoints").exists()
