"""lm-evaluation-harness asks the server by its own client for OpenAI's API, and scores what `generate` answers."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

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
QUESTIONS = [f"{number} + {number} =" for number in range(3)]
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def answers(loaded: LoadedModel, *, is_chat: bool, stop: str = "") -> list[str]:
    """What Python is answered with the harness's seed, at a budget that is not the model's own."""
    options = {"seed": 1234, "budget": 7, "max_new_tokens": 6, "stop": stop or ()}
    if is_chat:
        return [loaded.generate(question, **options) for question in QUESTIONS]
    return [to_text(loaded.generate(list(question.encode()), **options), loaded.tokenizer) for question in QUESTIONS]


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_task_is_scored_on_what_generate_answers(tmp_path: Path, is_chat: bool) -> None:
    loaded = talking_model()
    stop = answers(loaded, is_chat=is_chat)[0][3:5]
    wanted = answers(loaded, is_chat=is_chat, stop=stop)
    assert len(wanted[0]) == 3
    rows = [{"question": question, "answer": answer} for question, answer in zip(QUESTIONS, wanted, strict=True)]
    rows[1]["answer"] = "another"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASK.replace("ROWS", str(tmp_path / "rows.jsonl")).replace("UNTIL", json.dumps([stop, "<|im_end|>"]))
    (tmp_path / "sums.yaml").write_text(task)
    environment = os.environ | dict.fromkeys(OFFLINE, "1") | {"HF_HOME": str(tmp_path)}
    with serving(loaded) as url:
        kind = "chat-completions" if is_chat else "completions"
        given = f"base_url={url}/v1/{kind.replace('-', '/')},model=tiny,tokenizer_backend=None,num_concurrent=2"
        command = [sys.executable, "-m", "lm_eval", "run", "--model", f"local-{kind}", "--model_args", given]
        command += ["--tasks", "sums", "--include_path", tmp_path, "--gen_kwargs", "budget=7"]
        command += ["--output_path", tmp_path / "out", "--log_samples", *["--apply_chat_template"][: int(is_chat)]]
        told = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr[-3000:]
        figures = httpx.get(f"{url}/metrics").text.splitlines()
    [samples], [results] = ((tmp_path / "out").rglob(name) for name in ("samples_*.jsonl", "results_*.json"))
    said = {sample["doc_id"]: sample["resps"][0][0] for sample in map(json.loads, samples.read_text().splitlines())}
    assert [said[number] for number in range(3)] == wanted
    assert json.loads(results.read_text())["results"]["sums"]["exact_match,none"] == pytest.approx(2 / 3)
    evaluations = next(line for line in figures if line.startswith("l2d_evaluations_total"))
    assert float(evaluations.split()[1]) == 3 * 6 * 7  # a stop within a chunk is found when it has been decoded
