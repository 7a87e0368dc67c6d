"""Opens the models of a server: the one that it starts with, and the paths on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.distributed.memory import require_memory, tree_bytes
from l2d_jax.errors import InputError, require
from l2d_jax.loading import Folder, check_base, find, restore_path
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.serving.api.limits import RequestLimits
from l2d_jax.serving.api.paths import check_name
from l2d_jax.serving.models import Catalogue, ServedModel
from l2d_jax.weights.base_model import BaseFiles

BUDGETS = (1, 3, 7, 15, 31)  # budgets that the page offers
EFFORTS = {"none": 1, "low": 3, "medium": 7, "high": 15}  # offered if the model can spend them


@dataclass(frozen=True)
class Offers:
    """What a server offers for each of its models."""

    limits: RequestLimits  # without efforts
    efforts: Mapping[str, int] | None  # as the operator has set them; None: those of `EFFORTS` that can be spent
    has_paths: bool = False  # whether the first model is a base, whose budget is 1, for paths that can spend more

    def check_defaults(self, own: DecodeConfig, name: str) -> None:
        """Raise `InputError` for a model whose own options are beyond the limits."""
        limits, problem = (
            self.limits,
            f"{name}: the model's own options are a budget of {own.budget} and {own.draws} draws",
        )
        is_within = own.budget <= limits.budget and own.draws <= limits.draws
        require(is_within, f"{problem}: raise --max_budget or --max_draws to them")

    def serve(self, name: str, loaded: LoadedModel) -> ServedModel:
        """The model under its name; raises `InputError` for an effort whose budget cannot be spent."""
        path, own = loaded.model.path, loaded.defaults
        config = None if path is None else path.config
        limits = replace(self.limits, efforts=self.efforts_for(own, config))
        budgets = [budget for budget in BUDGETS if budget <= limits.budget and _is_spendable(budget, own, config)]
        about: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "l2d_jax", "budgets": budgets}
        about |= {"max_tokens": limits.context // 2, "has_path": path is not None}
        about |= {"max_budget": limits.budget, "max_draws": limits.draws, "efforts": dict(limits.efforts)}
        return ServedModel(name, loaded, limits, about)

    def efforts_for(self, settings: DecodeConfig, path: PathConfig | None) -> Mapping[str, int]:
        """The budgets of reasoning efforts; raises `InputError` for a budget that cannot be spent."""
        most, given = self.limits.budget, self.efforts or {}
        for name, budget in given.items():
            require(budget <= most, f"--efforts {name}={budget} exceeds --max_budget {most}: raise that")
        if self.efforts is None or (path is None and self.has_paths):
            wished = {name: budget for name, budget in (given or EFFORTS).items() if budget <= most}
            return {name: budget for name, budget in wished.items() if _is_spendable(budget, settings, path)}
        for name, budget in given.items():
            try:
                check_settings(replace(settings, budget=budget), path)
            except InputError as error:
                raise InputError(f"--efforts {name}={budget}: {error}") from None
        return given


@dataclass(frozen=True)
class PathOpener:
    """Opens paths on a language model that is already loaded."""

    base: BaseFiles
    loaded: LoadedModel  # the language model
    mesh: Mesh
    lanes: int
    offers: Offers
    models: Catalogue

    def open(self, name: str, folder: str) -> ServedModel:
        """Read a path, to be served under a name; raises `InputError` for one that does not belong to the base."""
        found = find_served(name, folder, self.base, served=self.models.get("").name)
        self._check_memory(name, found)
        self.offers.check_defaults(found.defaults, folder)
        path, step = restore_path(found, self.base, self.mesh)
        llm = self.loaded.decoder.llm
        model = Model(llm=llm, path=path, table=None)
        options: dict[str, Any] = {"defaults": found.defaults, "step": step, "is_copied": False}
        return self.offers.serve(name, replace(self.loaded, model=model, **options))

    def _check_memory(self, name: str, found: Folder) -> None:
        assert found.path_config is not None
        new = tree_bytes(DiffusionPath.declare(found.path_config, self.base.architecture))
        others = (model.loaded.model.path for model in self.models.models)
        paths = sum(tree_bytes(path) for path in others if path is not None)
        needs = {"weights": tree_bytes(self.loaded.model), "paths": paths + new, "paths of lanes": self.lanes * new}
        require_memory(needs, f"--lanes, or the number of paths without {name}")


def find_served(name: str, folder: str, base: BaseFiles, *, served: str) -> Folder:
    """Find a path on the base called `served`, before its weights are read; raises `InputError`."""
    check_name(name)
    found = find(folder)
    require(found.path_config is not None, f"{folder} has no diffusion path: give a folder that has one")
    is_random = found.trained is not None and found.trained.model.name == "random"
    require(not is_random, f"{folder} was trained on random weights, which are not stored: give a path on {served}")
    check_base(found, base)
    return found


def check_paths(paths: Sequence[tuple[str, str]], base: BaseFiles, *, served: str) -> list[Folder]:
    """Find the paths that a server is to start with; `served` is the name of its base. Raises `InputError`."""
    names = [served, *(name for name, _ in paths)]
    for name in names:
        require(names.count(name) == 1, f"two models are called {name!r}: give each --path another name")
    return [find_served(name, folder, base, served=served) for name, folder in paths]


def _is_spendable(budget: int, settings: DecodeConfig, path: PathConfig | None) -> bool:
    try:
        check_settings(replace(settings, budget=budget), path)
    except InputError:
        return False
    return True
