"""lm-evaluation-harness asks the server by its own client for OpenAI's API: it scores answers, and choices."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from l2d_jax.data.tokenizer import text_ids
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.stop_strings import to_text
from tests.support.served import serving, talking_model

missing = [name for name in ("lm_eval", "tenacity") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing != [], reason="needs the extra lm-eval")]
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: '{{question}}'
doc_to_target: '{{answer}}'
generation_kwargs: {until: UNTIL, max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICES = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: '{{question}}'
doc_to_choice: LISTED
doc_to_target: '{{answer}}'
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
# Worded as the harness words its own tasks of these names.
COMMON = """\
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS, dev: ROWS}}
test_split: test
output_type: multiple_choice
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}NORMALISED]
"""
NORMALISED = ", {metric: acc_norm, aggregation: mean, higher_is_better: true}"
LIKE: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "mmlu": (
        "fewshot_split: dev\nfewshot_config: {sampler: first_n}\nnum_fewshot: 1\n"
        "description: 'The following are multiple choice questions.\n\n'\n"
        "doc_to_text: '{{question.strip()}}\n\nA. {{choices[0]}}\n\nB. {{choices[1]}}\n\nAnswer:'\n"
        "doc_to_choice: ['A', 'B']\ndoc_to_target: answer\n",
        [{"question": f"{n} + {n}?", "choices": [str(2 * n), "x"], "answer": n % 2} for n in range(3)],
    ),
    "arc_easy": (
        "doc_to_text: 'Question: {{question}}\n\nAnswer:'\ndoc_to_choice: '{{choices.text}}'\n"
        "doc_to_target: '{{choices.label.index(answerKey)}}'\n",
        [
            {
                "question": f"{n}?",
                "choices": {"text": ["ice", "a fire", "sun"], "label": ["1", "2", "3"]},
                "answerKey": "2",
            }
            for n in range(3)
        ],
    ),
    "piqa": (
        "doc_to_text: 'Question: {{goal}}\n\nAnswer:'\ndoc_to_choice: '{{[sol1, sol2]}}'\ndoc_to_target: label\n",
        [{"goal": f"Eat {n}.", "sol1": "With a fork.", "sol2": "Never.", "label": n % 2} for n in range(3)],
    ),
    "hellaswag": (
        "doc_to_text: '{{query}}'\ndoc_to_choice: choices\ndoc_to_target: '{{label}}'\n",
        [{"query": f"He has {n} and", "choices": ["runs.", "is a stone."], "label": n % 2} for n in range(3)],
    ),
}
QUESTIONS = [f"{number} + {number} =" for number in range(3)]
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def answers(loaded: LoadedModel, *, is_chat: bool, stop: str = "") -> list[str]:
    """What Python is answered with the harness's seed, at a budget that is not the model's own."""
    options = {"seed": 1234, "budget": 7, "max_new_tokens": 6, "stop": stop or ()}
    if is_chat:
        return [loaded.generate(question, **options) for question in QUESTIONS]
    return [to_text(loaded.generate(list(question.encode()), **options), loaded.tokenizer) for question in QUESTIONS]


def run(folder: Path, url: str, task: str, kind: str, *options: str) -> list[dict[str, Any]]:
    """What the harness has recorded of each row of a task."""
    (folder / "sums.yaml").write_text(task.replace("ROWS", str(folder / "rows.jsonl")))
    given = f"base_url={url}/v1/{kind.replace('-', '/')},model=tiny,num_concurrent=2"
    given += f",tokenizer_backend={'huggingface,tokenizer=' + str(folder / 'tokenizer') if not options else 'None'}"
    call(folder, kind, given, "sums", *options)
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    found = map(json.loads, samples.read_text().splitlines())
    return sorted(found, key=lambda sample: sample["doc_id"])


def call(folder: Path, kind: str, given: str, tasks: str, *options: str) -> None:
    """Run the harness as a user does; `given` are its --model_args."""
    environment = os.environ | dict.fromkeys(OFFLINE, "1") | {"HF_HOME": str(folder)}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", f"local-{kind}", "--model_args", given]
    command += ["--tasks", tasks, "--include_path", str(folder), *options]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    told = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-3000:]


def result(folder: Path, metric: str) -> float:
    [results] = (folder / "out").rglob("results_*.json")
    return float(json.loads(results.read_text())["results"]["sums"][f"{metric},none"])


def test_choices_are_scored_by_the_likelihoods_of_score(tmp_path: Path) -> None:
    """By the prompt's tokens, which the server repeats with their log-probabilities, at the model's own budget."""
    loaded = talking_model()
    choices, likelihoods = [" 10", " x"], list[list[float]]()
    for question in QUESTIONS:
        texts = [list(f"{question}{choice}".encode()) for choice in choices]
        scored = [loaded.score([ids[:1]], [ids[1:]], seed=1234)[0] for ids in texts]
        likelihoods.append([float(one.tokens[len(question) - 1 :].sum()) for one in scored])
    best = [one.index(max(one)) for one in likelihoods]
    rows = [{"question": question, "answer": best[i]} for i, question in enumerate(QUESTIONS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert loaded.tokenizer is not None
    loaded.tokenizer.save_pretrained(tmp_path / "tokenizer")
    task = CHOICES.replace("LISTED", json.dumps([choice.strip() for choice in choices]))
    with serving(loaded) as url:
        samples = run(tmp_path, url, task, "completions")
    for sample, wanted in zip(samples, likelihoods, strict=True):
        assert [float(one[0][0]) for one in sample["resps"]] == pytest.approx(wanted, abs=1e-4)
    assert result(tmp_path, "acc") == 1.0


@pytest.mark.parametrize(("query", "words"), [("", ["--apply_chat_template"]), ("?budget=7&score_draws=16", [])])
def test_the_harnesss_own_wordings_run_as_they_are(tmp_path: Path, query: str, words: list[str]) -> None:
    """In one command, with the options of the model or of the address; what is scored are the texts that it records.

    The harness counts white space at the end of a context as a part of the choice.
    """
    loaded = talking_model()
    for name, (worded, rows) in LIKE.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = COMMON.replace("ROWS", str(tmp_path / f"{name}.jsonl"))
        task = task.replace("NORMALISED", "" if name == "mmlu" else NORMALISED)
        (tmp_path / f"{name}.yaml").write_text(f"task: like_{name}\n{task}{worded}")
    assert loaded.tokenizer is not None
    loaded.tokenizer.save_pretrained(tmp_path / "tokenizer")
    with serving(loaded, draws=64) as url:
        command = f"base_url={url}/v1/completions{query},model=tiny,num_concurrent=2,tokenizer_backend=huggingface"
        command += f",tokenizer={tmp_path / 'tokenizer'}"
        call(tmp_path, "completions", command, ",".join(f"like_{name}" for name in LIKE), *words)
    options = {"budget": 7, "draws": 16} if query else {}

    def encode(text: str) -> list[int]:
        return text_ids([text], loaded.tokenizer)[0]

    for name in LIKE:
        [file] = (tmp_path / "out").rglob(f"samples_like_{name}_*.jsonl")
        samples = list(map(json.loads, file.read_text().splitlines()))
        assert len(samples) == 3
        for sample in samples:
            pairs = [(one["arg_0"], one["arg_1"]) for one in sample["arguments"].values()]
            assert all(("<|im_start|>" in context) == bool(words) for context, _ in pairs)
            texts = [encode(context + choice) for context, choice in pairs]
            scored = [loaded.score([ids[:1]], [ids[1:]], seed=1234, **options)[0] for ids in texts]
            begins = [len(encode(context.rstrip())) - 1 for context, _ in pairs]
            ends = [one.tokens[begin:].sum() for one, begin in zip(scored, begins, strict=True)]
            assert [float(one[0][0]) for one in sample["resps"]] == pytest.approx(ends, abs=1e-4)


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_task_is_scored_on_what_generate_answers(tmp_path: Path, is_chat: bool) -> None:
    loaded = talking_model()
    stop = answers(loaded, is_chat=is_chat)[0][3:5]
    wanted = answers(loaded, is_chat=is_chat, stop=stop)
    assert len(wanted[0]) == 3
    rows = [{"question": question, "answer": answer} for question, answer in zip(QUESTIONS, wanted, strict=True)]
    rows[1]["answer"] = "another"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(loaded) as url:
        task, kind = (
            TASK.replace("UNTIL", json.dumps([stop, "<|im_end|>"])),
            "chat-completions" if is_chat else "completions",
        )
        options = ["--gen_kwargs", "budget=7", *["--apply_chat_template"][: int(is_chat)]]
        samples = run(tmp_path, url, task, kind, *options)
        figures = httpx.get(f"{url}/metrics").text.splitlines()
    assert [sample["resps"][0][0] for sample in samples] == wanted
    assert result(tmp_path, "exact_match") == pytest.approx(2 / 3)
    evaluations = next(line for line in figures if line.startswith("l2d_evaluations_total"))
    assert float(evaluations.split()[1]) == 3 * 6 * 7  # a stop within a chunk is found when it has been decoded
