"""Rows of the formats that people have, each as the conversation that it says."""

import pytest

from l2d_jax.data.row_formats import FORMATS, check_columns, conversation_of
from l2d_jax.errors import InputError

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": PAIR}, PAIR),
        ({"question": "q", "answer": "a"}, PAIR),
        ({"prompt": "q", "completion": "a"}, PAIR),
        ({"prompt": PAIR[:1], "completion": PAIR[1:]}, PAIR),
        ({"prompt": PAIR[:1], "completion": "a"}, PAIR),
        ({"prompt": "q", "completion": PAIR[1:]}, PAIR),
        ({"instruction": "q", "output": "a"}, PAIR),
        ({"instruction": "q", "input": "", "output": "a"}, PAIR),
        ({"instruction": "q", "input": None, "output": "a"}, PAIR),
        ({"instruction": "q", "input": "x", "output": "a"}, [{"role": "user", "content": "q\n\nx"}, PAIR[1]]),
        ({"instruction": "q", "output": "a", "system": "s"}, [SYSTEM, *PAIR]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, PAIR),
        ({"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]}, PAIR),
        ({"conversations": PAIR}, PAIR),
        ({"conversations": [{"from": "human", "value": "q"}], "system": "s"}, [SYSTEM, PAIR[0]]),
        ({"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]}, [CALL]),
        ({"conversations": [{"from": "observation", "value": "5"}]}, [{"role": "tool", "content": "5"}]),
        (
            {"conversations": [{"from": "gpt", "value": "a", "weight": 0}]},
            [{"role": "assistant", "content": "a", "weight": 0}],
        ),
        ({"messages": PAIR, "prompt": "other", "completion": "other"}, PAIR),  # the first format counts
        ({"messages": None, "question": "q", "answer": "a"}, PAIR),  # in rows of several files
    ],
)
def test_each_format_is_read(row, messages):
    assert conversation_of(row).messages == messages
    assert conversation_of({**row, "tools": "[]"}).tools == "[]"
    check_columns(row, "mine")


def test_answers_in_a_prompt_are_context():
    prompt = [*PAIR, {"role": "user", "content": "r"}]
    read = conversation_of({"prompt": prompt, "completion": PAIR[1:]}).messages
    assert [message.get("weight") for message in read] == [None, 0, None, None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, "'messages' must be a list of objects with role and content, got 'hi'"),
        ({"prompt": 5, "completion": "a"}, "'prompt' must be a list of objects with role and content, got 5"),
        ({"prompt": "q", "completion": None}, "'completion' must be text, got None: leave that row out"),
        ({"messages": None}, "'messages' must be a list of messages, got None: leave that row out"),
        ({"instruction": "q", "input": 5, "output": "a"}, "'input' must be text, got 5"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, r"is from one of human, .*, got 'bing': rename it"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, r"must be a call as JSON, got 'f\(1\)'"),
    ],
)
def test_what_is_no_conversation_is_named(row, message):
    with pytest.raises(InputError, match=message):
        conversation_of(row)


@pytest.mark.parametrize("found", [["chosen", "rejected"], ["text"], [f"column_{i}" for i in range(99)]])
def test_other_columns_are_refused_with_a_line_that_converts_them(found):
    with pytest.raises(
        InputError, match=r"rows need messages, conversations, .* has .*: datasets.Dataset.from_list"
    ) as caught:
        check_columns(found, "/a/long/folder" * 9)
    assert len(str(caught.value)) <= 300
    assert all(name in str(caught.value) for columns in FORMATS for name in columns)
