import json
import math
import time

import pytest
from tensorboardX.proto.event_pb2 import Event

from l2d_jax.config.schema import TrainConfig
from l2d_jax.errors import InputError, RunError
from l2d_jax.training.metrics import Metrics, StepLog, read_metrics
from l2d_jax.training.stopwatch import Stopwatch
from tests.support.programs import TIMES, full_disk


def write(workdir, steps, *, start=0, **values):
    metrics = Metrics(workdir, start=start, total=9)
    for step in steps:
        metrics.write(step, {"loss": step / 2, **values})
    metrics.close()


def steps_of(workdir):
    return [record["step"] for record in read_metrics(workdir)]


def events(workdir):
    """(step, tag, value) of every scalar in TensorBoard's files: records of length, checksum, data, checksum."""
    found = []
    for file in sorted((workdir / "tensorboard").iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 12 + size + 4
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_records_are_read_as_they_were_written(tmp_path):
    write(tmp_path, [1, 2], loss_by_t=[1.0, 2.0])
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 0.5, "loss_by_t": [1.0, 2.0]},
        {"step": 2, "loss": 1.0, "loss_by_t": [1.0, 2.0]},
    ]
    assert read_metrics(tmp_path / "none") == []


def test_scalars_go_to_tensorboard(tmp_path):
    write(tmp_path, [1, 2], loss_by_t=[1.0, 2.0])
    assert events(tmp_path) == [(1, "loss", 0.5), (2, "loss", 1.0)]


def test_a_record_is_on_disk_at_once(tmp_path):
    metrics = Metrics(tmp_path, start=0, total=9)
    metrics.write(1, {"loss": 0.5})
    assert steps_of(tmp_path) == [1]
    metrics.close()


def test_a_resumed_run_drops_what_it_does_again(tmp_path):
    write(tmp_path, [0, 1, 2, 3, 4, 5])
    write(tmp_path, [4, 5, 6], start=3)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["metrics.jsonl"]


@pytest.mark.parametrize("rest", ['{"step": 3, "lo', '{"step": 3}'])
def test_a_line_that_was_cut_off_is_dropped(tmp_path, rest):
    write(tmp_path, [1, 2])
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + rest)
    assert steps_of(tmp_path) == [1, 2]
    write(tmp_path, [3], start=2)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_progress_is_a_line_where_there_is_no_terminal(tmp_path, capsys):
    metrics = Metrics(tmp_path, start=0, total=9)
    metrics.progress(3, "loss 1.5")
    metrics.close()
    captured = capsys.readouterr()
    assert captured.out == "step 3/9  loss 1.5\n"
    assert captured.err == ""


@pytest.mark.parametrize("room", [0, 10])
def test_records_wait_while_the_disk_is_full(tmp_path, room):
    """Also where a part of a line fits; none is lost, none is cut in two."""
    metrics = Metrics(tmp_path, start=0, total=9)
    metrics.write(1, {"loss": 0.5})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with full_disk(room=size + room):
        for step in (2, 3):
            metrics.write(step, {"loss": step / 2})
        with pytest.raises(OSError, match="File too large"):
            metrics.sync()
        assert steps_of(tmp_path) == [1]
    metrics.write(4, {"loss": 2.0})
    metrics.sync()
    metrics.close()
    assert read_metrics(tmp_path) == [{"step": step, "loss": step / 2} for step in (1, 2, 3, 4)]


def test_a_run_is_not_held_up_by_the_copy_for_tensorboard(tmp_path):
    metrics = Metrics(tmp_path, start=0, total=9)
    with full_disk():
        for step in range(1000):
            metrics.write(step, {"loss": 0.5, "gradient_norm": 1.0})
    metrics.close()
    assert len(steps_of(tmp_path)) == 1000


def test_records_that_are_lost_at_the_end_are_an_error(tmp_path):
    metrics = Metrics(tmp_path, start=0, total=9)
    with full_disk():
        metrics.write(1, {"loss": 0.5})
        with pytest.raises(RunError, match=r"the last 1 records could not be written to .*metrics.jsonl \(File too"):
            metrics.close()


def test_a_full_disk_at_the_start_is_one_line(tmp_path):
    write(tmp_path, [1, 2])
    with full_disk(), pytest.raises(InputError, match=r"cannot write to workdir .*: File too large"):
        Metrics(tmp_path, start=2, total=9)
    assert steps_of(tmp_path) == [1, 2]


def step_log(metrics, *, every=1):
    return StepLog(
        metrics,
        TrainConfig(log_every=every, max_skipped=3),
        last=9,
        rate=lambda updates: updates / 2,
        ids=lambda step: [step, 70],
        watch=Stopwatch(),
    )


def test_time_that_a_record_takes_counts_for_the_next(tmp_path):
    metrics = Metrics(tmp_path, start=0, total=9)
    log = StepLog(
        metrics,
        TrainConfig(log_every=1, max_skipped=3),
        last=9,
        rate=lambda _: time.sleep(0.2) or 0.1,
        ids=lambda _: [],
        watch=Stopwatch(),
    )
    for step in (1, 2, 3):
        log.add(step, results(), tokens=100)
    metrics.close()
    first, second = (record["tokens_per_second"] for record in read_metrics(tmp_path))
    assert second < 500 < first


def results(*, skipped=0, loss=1.0):
    return {"loss": loss, "gradient_norm": 2.0, "skipped": skipped}


def test_a_skipped_update_is_a_record_whatever_its_step(tmp_path):
    """And it is no update: the learning rate is that of as many updates as there were, also in a run that resumes."""
    metrics = Metrics(tmp_path, start=0, total=9)
    log = step_log(metrics, every=2)
    for step in (1, 2, 3, 4):
        log.add(step, results(skipped=step == 3, loss=math.nan if step == 3 else 1.0), tokens=8)
    log.flush()
    metrics.close()
    metrics = Metrics(tmp_path, start=4, total=9)
    assert metrics.skipped == 1
    log = step_log(metrics)
    log.add(5, results(), tokens=8)
    log.flush()
    metrics.close()
    records = [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in read_metrics(tmp_path)]
    assert records == [
        {"step": 2, "loss": 1.0, "gradient_norm": 2.0, "learning_rate": 0.5},
        {"step": 3, "gradient_norm": 2.0, "skipped": 1},
        {"step": 4, "loss": 1.0, "gradient_norm": 2.0, "learning_rate": 1.0},
        {"step": 5, "loss": 1.0, "gradient_norm": 2.0, "learning_rate": 1.5},
    ]


def test_so_many_skipped_updates_in_a_row_stop_the_run(tmp_path):
    metrics = Metrics(tmp_path, start=0, total=9)
    log = step_log(metrics)
    for step, skipped in enumerate([1, 1, 0, 1, 1, 1], start=1):
        log.add(step, results(skipped=skipped, loss=math.inf), tokens=8)
        assert log.skipped in (0, 1, 2)
    with pytest.raises(RunError, match=r"^3 updates in a row .* at step 6 \(loss inf, .* read the rows 6, 70 of the"):
        log.flush()


DAMAGED = ["{", "3", "[]", '{"loss": 1}', '{"step": "2"}', '{"step": 2, "loss": NaN}', '{"step": 2, "loss": 1e400}']
DAMAGED += [
    '{"step": -1}',
    '{"step": 2, "step": 2}',
    '{"step": 2, "skipped": 7}',
    '{"step": 9, "loss": 1.0}',
    "[" * 20_000,
]


@pytest.mark.parametrize("damaged", [*(line.encode() for line in DAMAGED), b'{"step": 2, "\xff": 1}'])
def test_a_damaged_line_is_dropped_with_a_warning_and_the_run_goes_on(tmp_path, capsys, damaged):
    write(tmp_path, [1, 2, 3, 4])
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], damaged + b"\n", *lines[2:]]))
    write(tmp_path, [4], start=3)
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: line 2 of {file} is damaged and left out: ")
    assert len(warning) <= 300
    assert file.read_bytes() == b"".join([lines[0], *lines[2:]])  # what the checkpoint covers stays as it is
    assert steps_of(tmp_path) == [1, 3, 4]
    assert capsys.readouterr().err == ""


def test_what_is_not_finite_is_left_out_of_a_record(tmp_path):
    write(tmp_path, [1], norm=math.nan, losses=[1.0, math.inf])
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}]


def test_weights_and_biases_get_the_scalars(tmp_path, monkeypatch):
    """Offline, as a run that a restart goes on with."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for start in (0, 2):
        metrics = Metrics(tmp_path, start=start, total=4, wandb="project")
        metrics.write(start + 1, {"loss": 2.5, "by_t": [1.0, 2.0]})
        metrics.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    end = time.monotonic() + 30
    while not all(b"loss" in file.read_bytes() for file in files):  # another process writes them
        assert time.monotonic() < end
        time.sleep(0.1)
    assert len({file.name for file in files}) == 1  # named by the run's id
