"""The tokenizer and chat template of a model: the model's, or others that the config names."""

import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import ModelConfig
from l2d_jax.data.tokenizer import byte_tokenizer, load_tokenizer
from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import explained, read_json
from l2d_jax.weights import hub, locate

NAME = "tokenizer.json"
FOLDER = "tokenizer"  # folder in a workdir whose config names another tokenizer or chat template: a copy of both
TEMPLATE, OTHERS = "chat_template.jinja", "additional_chat_templates"
FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    f"{OTHERS}/*",
)

# The format of the release's template for base models (SakanaAI/L2D 456871e, tasks/templates.py, "base_llama").
# Questions and answers alternate, without a begin-of-text token. Only the last answer of a conversation, which is the
# one that is learnt, ends with the end-of-text token.
BASE_LLAMA = """\
{%- set titles = {'user': 'Question', 'assistant': 'Answer'} -%}
{%- for message in messages if message['role'] in titles -%}
{{- '### ' + titles[message['role']] + ' ###\n' + message['content'] -}}
{{- eos_token if loop.last and message['role'] == 'assistant' else '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Answer ###\n' -}}{%- endif -%}"""
TEMPLATES = {"base_llama": BASE_LLAMA}  # chat templates that config.model.chat_template may name


def is_replaced(config: ModelConfig) -> bool:
    """Whether a config names a tokenizer or chat template other than the model's."""
    return config.tokenizer is not None or config.chat_template is not None


def open_tokenizer(config: ModelConfig, folder: Path | None, *, vocabulary: int) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a model according to its config; None if there is none.

    `folder` has the model's files; None: the byte tokenizer. Raises `InputError` for unreadable files, and for ids
    beyond the `vocabulary` of the model.
    """
    if config.tokenizer is not None:
        tokenizer = load_tokenizer(_locate(config.tokenizer, NAME, "config.model.tokenizer"), vocabulary=vocabulary)
    elif folder is None:
        tokenizer = byte_tokenizer()
    elif (folder / NAME).exists():
        tokenizer = load_tokenizer(folder, vocabulary=vocabulary)
    else:
        rule = f"{folder} has no tokenizer, to which config.model.chat_template would belong"
        require(config.chat_template is None, f"{rule}: name one by config.model.tokenizer")
        return None
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template)
    return tokenizer


def read_chat_template(name: str) -> str | dict[str, str]:
    """Read the chat template of `TEMPLATES`, or in a file, folder or hub repository; several are keyed by name.

    Raises `InputError`.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    option = "config.model.chat_template"
    file = Path(os.path.expanduser(name))
    if file.is_file() and file.suffix != ".json":
        return _read(file)
    folder = _locate(name, "tokenizer_config.json", option)
    found = {path.stem: _read(path) for path in sorted((folder / OTHERS).glob("*.jinja"))}
    if (folder / TEMPLATE).is_file():
        found = {"default": _read(folder / TEMPLATE), **found}
    for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        if not found and file.is_file():
            found = _named(read_json(file).get("chat_template"), file)
    require(len(found) > 0, f"{option} names {folder}, which has no chat template: give a .jinja file")
    return found["default"] if set(found) == {"default"} else found


def _named(value: Any, file: Path) -> dict[str, str]:
    """The templates in a JSON file written by transformers, keyed by name."""
    if isinstance(value, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in value):
        value = {one["name"]: one["template"] for one in value}
    named = {} if value is None else {"default": value} if isinstance(value, str) else value
    if not (isinstance(named, dict) and all(isinstance(part, str) for pair in named.items() for part in pair)):
        raise InputError(f"{file}: chat_template must be text, or a list of names and templates, got {shown(value)}")
    return named


def _read(file: Path) -> str:
    try:
        with explained(f"cannot read {file}", "check its permissions"):
            return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 at byte {error.start}: fix it") from None


def _locate(name: str, file: str, option: str) -> Path:
    """The folder of a name, or the folder that contains the named file."""
    path = Path(os.path.expanduser(name))
    if path.name == file and path.is_file():
        return path.parent
    try:
        return locate.locate(name, files=hub.TEXT_FILES)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a tokenizer with its chat templates into an existing folder, replacing those in it."""
    for file in [file for pattern in FILES for file in folder.glob(pattern) if file.is_file()]:
        file.unlink()
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # jinja files lose carriage returns


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the files of a tokenizer into a folder, replacing those in it."""
    for file in [file for pattern in FILES for file in out.glob(pattern) if file.is_file()]:
        file.unlink()
    for file in [file for pattern in FILES for file in source.glob(pattern) if file.is_file()]:
        (out / file.relative_to(source)).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, out / file.relative_to(source))
