"""Traces as files: their rows, their page, and the program that writes them."""

import json
from html.parser import HTMLParser

import pytest

from l2d_jax import generate as program
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.trace import TokenTrace
from l2d_jax.errors import InputError
from l2d_jax.programs import generate as generating
from l2d_jax.reports import trace as pages
from tests.support.programs import call, write_base

HOSTILE = '<script>alert("&")</script>'


def token(text, **changes):
    fields = {"token": 7, "text": text, "likeliest": 7, "evaluations": 15, "passes": 2, "rejected": 0, "settled": 0.5}
    fields |= {"plain_likeliest": 7, "entropy": 1.25}
    return TokenTrace(**{**fields, "plain_entropy": 2.5, "skipped": False, **changes})


ANSWERS = [
    pages.AnswerTrace(
        0, f"Say {HOSTILE} $legend", DecodeConfig(), [token(HOSTILE, plain_likeliest=8), token("\n"), token("")]
    ),
    pages.AnswerTrace(0, "Bye\n", DecodeConfig(budget=1), [token("ok", skipped=True, settled=0.0)]),
    pages.AnswerTrace(1, "?", DecodeConfig(), []),
]


def test_rows(tmp_path):
    pages.write_trace(tmp_path, ANSWERS)
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(row["sequence"], row["prompt"], row["position"]) for row in rows] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 0, 2),
        (1, 0, 0),
    ]
    assert list(rows[3]) == ["sequence", "prompt", "solver", "budget", "position", *TokenTrace._fields]
    assert rows[0]["text"] == HOSTILE
    assert (rows[3]["budget"], rows[3]["solver"], rows[3]["skipped"]) == (1, "midpoint", True)


class Page(HTMLParser):
    """Its elements, and the text and title of every span of an answer."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.spans = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        if name != "meta":  # which has no end
            self.open.append(name)
        assert not {"src", "href"} & dict(attributes).keys()
        if name == "span" and "title" in dict(attributes):
            self.spans.append([dict(attributes), ""])

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if self.open and self.open[-1] == "span" and self.spans:
            self.spans[-1][1] += data


def test_a_page_is_whole_and_escapes_all_text(tmp_path):
    pages.write_trace(tmp_path, ANSWERS)
    text = (tmp_path / "trace.html").read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.names
    assert HOSTILE not in text
    assert not any(word in text for word in ("http", "url(", "@import"))
    assert [shown for _, shown in page.spans] == [HOSTILE, "↵\n", "⟨7⟩", "ok"]
    first, *_, last = (attributes for attributes, _ in page.spans)
    assert first["style"] == "--t:0.500"
    assert first["class"].split() == ["changed"]
    assert "1 differ from the language model's tokens" in text
    assert first["title"].splitlines()[:2] == ["position: 0", "token: 7"]
    assert HOSTILE in first["title"]
    assert {
        "evaluations: 15",
        "rejected: 0",
        "settled: 0.5",
        "entropy: 1.25",
        "plain entropy: 2.5",
        "skipped: false",
    } <= {*first["title"].splitlines()}
    assert last["class"].split() == ["skipped"]
    assert page.names.count("h2") == 3
    assert "Say &lt;script&gt;" in text
    assert "color-scheme: light dark" in text


# --- the program ---


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base")


def test_the_program_writes_both_files_for_all_answers(base, tmp_path):
    arguments = ["--model", base, "--prompt", "Hi", "--prompt", "<b>", "--budget", 1, 1, "--max_new_tokens", 6]
    plain = call(program.main, *arguments)
    traced = call(program.main, *arguments, "--trace", tmp_path / "out")
    assert (traced.status, traced.err, traced.out) == (0, "", plain.out)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["trace.html", "trace.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "trace.jsonl").read_text().splitlines()]
    assert {(row["sequence"], row["prompt"]) for row in rows} == {(0, 0), (1, 0), (2, 1), (3, 1)}
    said = "".join(row["text"] for row in rows if row["sequence"] == 0)
    assert f"[budget 1] Hi\n{said}\n" in plain.out
    assert "&lt;b&gt;" in (tmp_path / "out" / "trace.html").read_text()
    again = call(program.main, *arguments, "--trace", tmp_path / "out")
    assert "output goes into a new or empty folder" in again.error


def test_a_failed_trace_leaves_no_folder(base, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise InputError("full")

    monkeypatch.setattr(pages.page, "write_page", fail)
    out = tmp_path / "out"
    arguments = ["--model", base, "--prompt", "Hi", "--max_new_tokens", 4]
    assert call(program.main, *arguments, "--trace", out).error == "full"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a trace is of answers to prompts, not of a chat: give a --prompt"),
        (["--prompt", "Hi", "--draws", 2], "a trace follows one noise sample per token, got draws 2"),
    ],
)
def test_bad_traces_are_one_line_before_anything_is_loaded(base, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(generating, "load", None)
    assert message in call(program.main, "--model", base, "--trace", tmp_path / "out", *arguments).error
    assert list(tmp_path.iterdir()) == []
