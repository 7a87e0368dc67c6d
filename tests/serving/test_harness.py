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
    environment = os.environ | dict.fromkeys(OFFLINE, "1") | {"HF_HOME": str(folder)}
    given = f"base_url={url}/v1/{kind.replace('-', '/')},model=tiny,num_concurrent=2"
    given += f",tokenizer_backend={'huggingface,tokenizer=' + str(folder / 'tokenizer') if not options else 'None'}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", f"local-{kind}", "--model_args", given]
    command += ["--tasks", "sums", "--include_path", str(folder), *options]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    told = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    found = map(json.loads, samples.read_text().splitlines())
    return sorted(found, key=lambda sample: sample["doc_id"])


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
