"""Publishes the path of a run: a folder for the hub, with a page that says how it was trained and measured."""

from pathlib import Path
from typing import Any

import jax

from l2d_jax.config.schema import Config, MeshConfig
from l2d_jax.data.tokenizer import load_tokenizer
from l2d_jax.distributed import runtime
from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import read_json
from l2d_jax.reports.training import budget_rows, first_and_last
from l2d_jax.storage.partial import output_folder, scratch_folder
from l2d_jax.training.workdir import recorded_config
from l2d_jax.weights import hub, model_folder, publish
from l2d_jax.weights.export import Parts


def publish_run(workdir: Path, repo: str, *, base: str | None = None, dry_run: Path | None = None) -> str:
    """Write the path of a run as a folder for the hub, and upload it unless `dry_run` names a folder.

    `base` is the hub id of the language model, if the run has it as a folder. Returns a line that says what was done.
    Raises `InputError`.
    """
    require(hub.HUB_ID.fullmatch(repo) is not None and "@" not in repo, f"--repo is org/name, got {shown(repo)}")
    parts = Parts.open(str(workdir))
    if parts.path is None:
        raise InputError(f"{workdir} trained no diffusion path: write it by convert export, and upload that folder")
    base = base or model_folder.base_name(workdir / "export")
    if hub.is_on_hub(base):
        hub_id, revision = hub.split_revision(base)
        base = f"{hub_id}@{revision or hub.plan_download(base).revision}"
    elif dry_run is None:
        raise InputError(f"the base of {workdir} is the folder {base}, which is here alone: give --base org/name")
    about: dict[str, Any] = {"config": recorded_config(workdir), "measured": first_and_last(workdir)[1]}
    about["license"] = read_license(base)
    with scratch_folder() as scratch:
        out = dry_run or scratch / "path"
        with output_folder(out) as partial:
            parameters = _write_published(parts, workdir / "export", partial, base=base)
            write_card(partial, repo=repo, base=base, parameters=parameters, **about)
        if dry_run is None:
            return f"published {hub.upload(out, repo)}"
    nobody = "" if hub.is_on_hub(base) else ", whose base is a folder: give --base org/name before you upload it"
    return f"wrote {out}{nobody}"


def _write_published(parts: Parts, trained: Path, out: Path, *, base: str) -> int:
    """Write the path of a run for PyTorch and for this package; returns its number of parameters."""
    path = model_folder.load_path(trained, parts.architecture, runtime.start_jax(MeshConfig()))
    hub_id, revision = hub.split_revision(base)
    raw = read_json(parts.language_model.folder / "config.json")
    texts = parts.language_model.tokenizer_folder
    tokenizer = load_tokenizer(texts) if (texts / "tokenizer.json").exists() else None
    about: dict[str, Any] = {"base": hub_id, "base_revision": revision, "base_config": raw, "tokenizer": tokenizer}
    publish.write_torch_folder(out, path, parts.architecture, **about)
    fingerprint = read_json(trained / "path.json").get("base_fingerprint")
    is_replaced = parts.language_model.texts is not None
    about = {"base": base, "base_fingerprint": fingerprint, "replaces_tokenizer": is_replaced}
    model_folder.write_record(out, path.config, **about)
    return sum(leaf.size for leaf in jax.tree.leaves(path))


def write_card(
    out: Path, *, repo: str, base: str, config: Config, measured: dict[str, Any], parameters: int, license: str | None
) -> None:
    """Write `README.md` into a folder that already has a path, to be published as `repo` (org/name).

    `base` is org/name@revision, or a folder in a trial. `config` is that of the training, `measured` the record of its
    last validation, `parameters` the number of trained values, and `license` that of the base (None: unknown).
    """
    import huggingface_hub  # here, because it reads the environment when it is imported

    base_id, revision = hub.split_revision(base)
    options: dict[str, Any] = {"license": license or None, "library_name": "transformers", "tags": ["l2d", "diffusion"]}
    options["base_model"] = base_id if revision else None  # a folder means nothing on other machines
    told: dict[str, Any] = {"title": repo.rpartition("/")[2], "repo": repo, "base_id": base_id, "revision": revision}
    told |= {"license": license, "config": config, "budget": config.decode.budget, "parameters": f"{parameters:,}"}
    told |= {"steps": measured["step"], "table": budget_rows(measured)}
    template = str(Path(__file__).with_name("model_card.md"))
    data = huggingface_hub.ModelCardData(pipeline_tag="text-generation", **options)
    huggingface_hub.ModelCard.from_template(data, template_path=template, **told).save(out / "README.md")


def read_license(base: str) -> str | None:
    """The licence in the model card of a base (a folder or hub id); None if it names none."""
    import huggingface_hub

    folder = Path(base)
    page = folder / "README.md"
    if folder.is_dir() and not page.is_file():
        return None
    try:
        card = huggingface_hub.ModelCard.load(page if folder.is_dir() else hub.split_revision(base)[0])
    except Exception:  # the client raises errors of many types; without a page there is no licence
        return None
    return getattr(card.data, "license", None)
