"""The Hugging Face hub: access to a model, its revision, which files are missing locally, downloads and uploads."""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from l2d_jax.errors import InputError, require, shorten, shown

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")  # with or without a revision
HUB = "hub:"  # prefix that marks a hub id, even if the working directory has a folder of that name
TEXT_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]  # files of a language model, except weights
FILES = ["*.safetensors", *TEXT_FILES]  # neither pickles nor code


class Download(NamedTuple):
    """The plan of a download."""

    revision: str  # the commit to which the name refers
    missing: int  # bytes that are not in the cache yet
    cache: Path  # folder to which they are downloaded


def is_on_hub(name: str) -> bool:
    """Whether a name is a hub id, and not a folder or file of this machine or in a bucket."""
    if name.startswith(HUB):
        return True
    path = Path(os.path.expanduser(name))
    return bool(HUB_ID.fullmatch(name)) and not os.path.exists(path) and not os.path.isdir(path.parent)


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `org/name@revision`; None: the newest revision."""
    hub_id, _, revision = name.removeprefix(HUB).partition("@")
    return hub_id, revision or None


def download(name: str, files: list[str]) -> Path:
    """Download missing `files` of a model; returns its local folder. Raises `InputError`."""
    hub_id, revision = split_revision(name)
    return Path(_ask(hub_id, allow_patterns=files, **({"revision": revision} if revision else {})))


def plan_download(name: str) -> Download:
    """Ask the hub, or without a network the cache, what a download would do; raises `InputError`."""
    import huggingface_hub  # here, because it reads the environment when it is imported

    hub_id, revision = split_revision(name)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    wanted: dict[str, Any] = {"allow_patterns": FILES, "revision": revision}
    try:
        files = _ask(hub_id, **wanted, dry_run=True)
    except InputError as error:
        try:  # a host without a network may have all files
            folder = huggingface_hub.snapshot_download(hub_id, **wanted, local_files_only=True)
        except Exception:
            raise error from None
        return Download(os.path.basename(folder), 0, cache)
    require(len(files) > 0, f"{hub_id} has no files of a model on the hub: check the name")
    return Download(files[0].commit_hash, sum(file.file_size for file in files if file.will_download), cache)


def upload(folder: Path, repo: str) -> str:
    """Upload a folder as a model repository, which is created if necessary; returns its URL. Raises `InputError`."""
    import huggingface_hub

    try:
        address = huggingface_hub.create_repo(repo, exist_ok=True)
        huggingface_hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload a diffusion path")
    except Exception as error:  # as for a download
        problem = f"{shown(repo)} could not be written on the hub ({_reason(error)})"
        raise InputError(f"{problem}: give org/name, and set HF_TOKEN to a token that may write there") from None
    return str(address)


def _ask(hub_id: str, **options: Any) -> Any:
    """Call `snapshot_download`, and turn its errors into one line with a remedy."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return huggingface_hub.snapshot_download(hub_id, **options)
    except errors.GatedRepoError:
        remedy = f"accept its licence at https://huggingface.co/{hub_id} and set HF_TOKEN to a token of that account"
        raise InputError(f"{hub_id} is gated: {remedy}") from None
    except errors.RevisionNotFoundError:
        wanted = f"{hub_id} has no revision {options.get('revision')} on the hub"
        raise InputError(f"{wanted}: name one that it has, or leave it out for the newest") from None
    except Exception as error:  # the client raises errors of its HTTP library, which changes, and many others
        problem = f"no folder {shown(hub_id)}, nor could the hub give it ({_reason(error)})"
        raise InputError(f"{problem}: give a local folder") from None


def _reason(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", 140)
