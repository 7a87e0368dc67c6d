import json

import pytest
from tensorboardX.proto.event_pb2 import Event

from l2d_jax.metrics import Metrics, read_metrics


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
