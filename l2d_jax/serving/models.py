"""The models of a server: a base, and the paths on it, which may come and go while the server runs.

All share the base's weights. Paths with equal configs also share lanes, where their answers are decoded together.
"""

import dataclasses
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.batch.lane_paths import can_share
from l2d_jax.decoding.batch.lanes import Lanes
from l2d_jax.decoding.batch.prompt_reader import Service
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.errors import InputError, require, shown
from l2d_jax.model.l2d import Model
from l2d_jax.serving.api.limits import RequestLimits


@dataclass(frozen=True, eq=False)
class LaneModel:
    """A model for lanes. Answers may be decoded together only if theirs is the same object."""

    of: "ServedModel"  # a model that they belong to
    are_mixed: bool = False  # whether answers name their paths, which all have the config of that model's path
    reader: object = field(default_factory=object)  # tells prompts apart that the path itself has read

    @property
    def programs(self) -> Hashable:
        """What the programs of such lanes depend on; models of equal shapes have the same."""
        path = self.of.loaded.model.path
        return self.are_mixed, None if path is None else path.config

    def open(self, *, lanes: int, refines: bool, service: Service) -> Lanes:
        """Open lanes, in which all share what `service` says; `refines`: the path itself reads the context."""
        own = service._replace(are_mixed=self.are_mixed, reader=self.reader if refines else None)
        model = self.of.loaded.model if self.are_mixed else self.of.whole.decoder
        return Lanes(model.reading(refines=refines), lanes=lanes, stop_ids=self.of.loaded.stop_ids, service=own)


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that requests can name."""

    name: str
    loaded: LoadedModel
    limits: RequestLimits
    about: Mapping[str, Any]  # its entry in `/v1/models`
    shared: LaneModel | None = None  # lanes that it shares with other paths on its base, where it can

    @cached_property
    def _alone(self) -> LaneModel:
        return LaneModel(self)

    @cached_property
    def whole(self) -> LoadedModel:
        """The model with the table of vocabulary vectors, which a path in shared lanes has only if it is needed."""
        model = self.loaded.model
        if model.path is None or model.table is not None:
            return self.loaded
        return dataclasses.replace(self.loaded, model=Model.build(model.llm, model.path))

    def lane_model(self, settings: DecodeConfig) -> LaneModel:
        """The model for lanes in which an answer with these settings can be decoded."""
        path = self.loaded.model.path
        if self.shared is not None and path is not None and can_share(path.config, settings):
            return self.shared
        return self._alone

    def scorer(self, settings: DecodeConfig) -> LoadedModel:
        """The model that scores and traces with these settings."""
        return self.whole if settings.velocity == "expectation" else self.loaded


class Catalogue:
    """The models of a server by name. Any thread may call its methods."""

    def __init__(self, base: ServedModel) -> None:
        """`base` answers requests that name no model; it is never removed."""
        self._base, self._lock = base, threading.Lock()
        self._models = {base.name: base}
        self._families: dict[PathConfig, LaneModel] = {}

    @property
    def models(self) -> Sequence[ServedModel]:
        """All models, the base first."""
        return [*self._models.values()]

    def get(self, name: str) -> ServedModel:
        """The model with this name; without a name, the base. Raises `InputError` with the names that there are."""
        if not name:
            return self._base
        try:
            return self._models[name]
        except KeyError:
            names = ", ".join(repr(one.name) for one in self.models)
            raise InputError(f"there is no model {shown(name)} here: there is {names}") from None

    def add(self, model: ServedModel) -> ServedModel:
        """Add a model with a path on the base; returns it with the lanes that it shares.

        Raises `InputError` if there is a model of its name.
        """
        of_model = model.loaded.model
        assert of_model.path is not None
        with self._lock:
            self._check_free(model.name)
            config = of_model.path.config
            if can_share(config, dataclasses.replace(model.loaded.defaults, budget=1)):
                family = LaneModel(model, are_mixed=True)
                model = dataclasses.replace(model, shared=self._families.setdefault(config, family))
            self._models[model.name] = model
        return model

    def check_free(self, name: str) -> None:
        """Raise `InputError` unless a model can be added under this name."""
        with self._lock:
            self._check_free(name)

    def _check_free(self, name: str) -> None:
        require(
            name not in self._models, f"there is a model {shown(name)} already: drop it first, or take another name"
        )

    def remove(self, name: str) -> None:
        """Remove a path; its running answers go on. Raises `InputError` for the base and for an unknown name."""
        with self._lock:
            model = self.get(name)
            problem = f"{model.name!r} is the base of this server, which all paths need"
            require(model is not self._base, f"{problem}: drop one of its paths")
            del self._models[model.name]
            in_use = {one.shared for one in self.models}
            self._families = {config: one for config, one in self._families.items() if one in in_use}
