"""Plans of evaluations: settings are checked and problems are read before any weights are loaded."""

import dataclasses
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerFast

from l2d_jax.config.choices import LIKELIHOOD_DRAWS, SEARCH_OPTIONS
from l2d_jax.config.config_file import override_names
from l2d_jax.config.schema import CATEGORIES, Config, DecodeConfig
from l2d_jax.data.tokenizer import require_tokenizer
from l2d_jax.decoding.refinement.solver import split_budget
from l2d_jax.decoding.requests import SAMPLING_OPTIONS, check_asked, override_settings
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError, require
from l2d_jax.evaluation.held_out import HeldOut, find_held_out
from l2d_jax.evaluation.results import Results
from l2d_jax.evaluation.sandbox import grade
from l2d_jax.evaluation.tasks.counts import ProblemCounts, differences
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Problem, Prompts, Run
from l2d_jax.evaluation.tasks.task import Task, encode_problems
from l2d_jax.files import Fingerprint, digest
from l2d_jax.loading import Folder
from l2d_jax.weights import base_model
from l2d_jax.weights.locate import absolute_name

DECODING_OPTIONS = ("solver", "tolerance", "guidance", "temperature", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class EvaluationProtocol:
    """How problems are given to the model, for every task."""

    batch_size: int  # sequences at a time
    samples: int  # completions per problem
    seed: int
    label: int | Literal["category"] | None  # class for guidance; "category": each problem's own
    prompts: Prompts
    tagged: bool  # judge only the text in <answer> tags or after </think>; always with prompts "reasoning"
    choices: Literal["generate", "likelihood"]  # "likelihood": choose the most likely letter, with one pass
    draws: int  # noise samples for the likelihood


class TaskPlan(NamedTuple):
    """A task with its settings and problems."""

    task: Task
    problems: Sequence[EncodedProblem]
    digest: str  # hash of the problems and their prompts
    settings: DecodeConfig
    protocol: EvaluationProtocol
    counts: ProblemCounts
    search: SearchConfig | None = None  # how the beams of an answer are searched; None: no search
    held_out: HeldOut | None = None  # problems on which options are chosen; None: nothing is chosen

    @property
    def lanes(self) -> int:
        """The number of answers at a time: the beams of a search are sequences of a batch."""
        return self.protocol.batch_size // (1 if self.search is None else self.search.beams)

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The prompts of all problems, including those held out."""
        held_out = () if self.held_out is None else self.held_out.problems
        return [one.ids for one in (*self.problems, *held_out)]

    def with_values(self, values: Mapping[str, float]) -> "TaskPlan":
        """The plan with these values of options that were chosen on held-out problems."""
        guidance = values.get("guidance", self.settings.guidance)
        scoring: dict[str, Any] = {name: value for name, value in values.items() if name != "guidance"}
        search = None if self.search is None else dataclasses.replace(self.search, **scoring)
        return self._replace(settings=dataclasses.replace(self.settings, guidance=guidance), search=search)


def label_of(problem: Problem, protocol: EvaluationProtocol) -> int | None:
    """The class of a problem for guidance: the number of its category, or the label that all problems share."""
    return CATEGORIES.index(problem.category) if protocol.label == "category" else protocol.label


def check_same(found: Folder, config: Config) -> None:
    """Raise `InputError` if the config names another model than the workdir's."""
    name, problem = config.model.name, f"the path of {found.path} was trained on {found.base_name}"
    remedy = "give the config that it was trained with, or none"
    is_same = found.base_name in (name, absolute_name(name))
    require(is_same, f"{problem}, and the config's model is another, {name}: {remedy}")
    trained = config if found.trained is None else found.trained
    for option in ("tokenizer", "chat_template"):
        was, now = (getattr(one.model, option) for one in (trained, config))
        rule = f"{found.path} was trained with config.model.{option} {was!r}, and the config has {now!r}"
        require(was == now, f"{rule}: {remedy}")


def choose_run(tasks: Sequence[Task], *, is_allowed: bool) -> Run | None:
    """The function that runs generated programs; None if no task needs it.

    Raises `InputError` if running is not allowed or not possible.
    """
    names = [task.name for task in tasks if task.kind == "code"]
    if not names:
        return None
    require(is_allowed, f"{', '.join(names)} runs programs that the model writes: allow it with --allow_code_execution")
    reason = processes.decide(grade.unavailable)
    require(reason is None, str(reason))
    if (note := processes.decide(grade.unbounded)) is not None:
        processes.print_once(note)
    return grade.grade


def asked_options(options: Namespace) -> dict[str, Any]:
    """The decoding options set on this command line, by name; raises `InputError` if one is set twice."""
    given = {name: value for name in DECODING_OPTIONS if (value := getattr(options, name)) is not None}
    overrides = override_names(options.overrides, "decode")
    for name in overrides.keys() & ({*given, "budget"} if options.budget else given):
        raise InputError(f"--{name} and --config.decode.{name} are both given: leave one of them out")
    has_total = options.total_budget is not None and "budget" in overrides
    require(not has_total, "--total_budget and --config.decode.budget are both given: leave one of them out")
    is_tuned = "guidance" in (options.tune or ()) and "guidance" in overrides | given
    require(not is_tuned, "--tune guidance chooses the guidance, which is given as well: leave one of them out")
    return overrides | given


def check_asked_options(options: Namespace, plans: Sequence[TaskPlan], found: Folder, *, used: Sequence[str]) -> None:
    """Raise `InputError` for an option that was set and changes nothing; options in `used` count as used."""
    is_ranked, has_label = options.choices == "likelihood", options.label is not None
    require(is_ranked or options.draws is None, "--draws needs --choices likelihood: give both, or neither")
    asked = asked_options(options).keys() - set(used)
    ignored = {*SAMPLING_OPTIONS, "draws"} & asked if is_ranked else set()
    ignored |= {"samples"} if is_ranked and options.samples is not None else set()
    for name in sorted(ignored):
        raise InputError(f"{name} is for generated answers, and --choices likelihood generates none: leave it out")
    asked |= {"label"} if has_label else set()
    check_asked(asked, [plan.settings for plan in plans], found.path_config, has_label=has_label)


def make_plans(
    tasks: Sequence[Task], options: Namespace, decode: DecodeConfig, base: base_model.BaseFiles
) -> list[TaskPlan]:
    """Make a plan for each task and budget, and read and encode its problems; raises `InputError`.

    A task uses its own sampling, except where the command line sets options, overrides or a config with other values.
    `decode` is the decode section of that config, or else the settings with which the model was validated.
    """
    tokenizer = require_tokenizer(base.tokenizer)
    asked = {field.name: getattr(options, field.name) for field in dataclasses.fields(EvaluationProtocol)}
    asked["tagged"] |= options.prompts == "reasoning"
    asked["draws"] = LIKELIHOOD_DRAWS if options.draws is None else options.draws
    chosen, defaults = asked_options(options), vars(DecodeConfig())
    plans = []
    for task in tasks:
        given = {name: getattr(options, name) for name in ("limit", "split", "shots")}
        problems = processes.take_turns(partial(task.load, options.data_dir, prompts=options.prompts, **given))
        if options.data_dir is None and options.prompts == "paper" and set(given.values()) == {None}:
            task.check_size(problems)  # the paper's whole split
        encoded = encode_problems(problems, tokenizer)
        sampling = task.sampling_for(options.prompts)._asdict()
        usual = {name: value for name, value in sampling.items() if value is not None}
        samples = usual.pop("samples")
        of_config = {name: value for name in usual if (value := getattr(decode, name)) != defaults[name]}
        wanted = chosen if options.config is None else of_config | chosen
        changed = [name for name in usual if wanted.get(name, usual[name]) != usual[name]]
        others = [f"{name} {wanted[name]}, not {usual[name]}" for name in changed]
        if wanted.get("velocity_temperature") == 0:
            del usual["anneal"]  # it has no effect at this temperature
        counts = count_problems(task, problems, encoded, tokenizer, options)
        processes.print_once("; ".join([f"{task.name}: {counts}", *others]))
        hashed = digest([[one.problem._asdict(), one.ids] for one in encoded])
        protocol = EvaluationProtocol(**asked | {"samples": options.samples or samples})
        _check_protocol(protocol, encoded, options)
        held_out = None
        if options.tune:
            held_out = find_held_out(task, tasks, options, {one.problem.category for one in encoded}, tokenizer)
        for budget in _budgets(options, wanted.get("solver", decode.solver)):
            settings = override_settings(decode, usual | wanted | ({} if budget is None else {"budget": budget}))
            search = _search_config(options, settings)
            same = f"{protocol.samples} samples of a problem of {task.name} are the same at temperature 0 and budget 1"
            final = 0.0 if search is None else search.final_temperature
            differ = max(settings.temperature, final) > 0 or settings.budget > 1 or protocol.samples == 1
            require(differ, f"{same}: give --samples 1, or a --temperature")
            parts = sorted({part for part in options.tune or () if part == "search" or settings.budget > 1})
            tuned_on = HeldOut(parts, *held_out) if held_out is not None and parts else None
            plans.append(TaskPlan(task, encoded, hashed, settings, protocol, counts, search, tuned_on))
    return plans


def count_problems(
    task: Task,
    problems: Sequence[Problem],
    encoded: Sequence[EncodedProblem],
    tokenizer: PreTrainedTokenizerFast,
    options: Namespace,
) -> ProblemCounts:
    """The numbers of problems that were read and that fit, next to the paper's."""
    usual = {"split": task.split, "shots": task.shots}
    chosen = {name: getattr(options, name) for name in ("limit", "split", "shots", "prompts")}
    others = {name: value for name, value in chosen.items() if value != usual.get(name)}
    return ProblemCounts(
        len(encoded), len(problems) - len(encoded), task.papers, reason=differences(tokenizer, **others)
    )


def _check_protocol(protocol: EvaluationProtocol, problems: Sequence[EncodedProblem], options: Namespace) -> None:
    """Raise `InputError` if a batch is too small, or if likelihoods are wanted for problems without options."""
    few = f"--batch_size {protocol.batch_size} does not hold the {protocol.samples} samples of a problem"
    is_held = protocol.batch_size >= protocol.samples or options.beams is not None  # each sample is a search
    require(is_held, f"{few}: use {protocol.samples} or more")
    without = next((one.problem.id for one in problems if not one.problem.options), None)
    is_ranked = protocol.choices == "likelihood"
    require(not (is_ranked and without), f"{without} has no options to rank: use --choices generate")


def _budgets(options: Namespace, solver: str) -> Sequence[int | None]:
    """The budgets per beam; None: that of the settings."""
    if options.total_budget is None:
        return options.budget or [None]
    split = (split_budget(solver, total, beams=options.beams) for total in options.total_budget)
    return list(dict.fromkeys(split))


def _search_config(options: Namespace, settings: DecodeConfig) -> SearchConfig | None:
    """How the beams of an answer are searched, at the temperature of the task; None without `--beams`."""
    if options.beams is None:
        return None
    given = {name: value for name in SEARCH_OPTIONS if (value := getattr(options, name)) is not None}
    shared = {name: getattr(settings, name) for name in ("temperature", "max_new_tokens")}
    return SearchConfig(beams=options.beams, **given, **shared)


def open_results(plan: TaskPlan, options: Namespace, found: Folder, step: int | None, model: Fingerprint) -> Results:
    """Open the results of a plan for the model at `step`; raises `InputError` if the folder has another evaluation."""
    protocol = dataclasses.asdict(plan.protocol)
    name = f"{plan.settings.solver}-{plan.settings.budget}"
    name += f"-end_{plan.settings.end:g}" if plan.settings.end != 1 else ""
    name += f"-{protocol['prompts']}" if protocol["prompts"] != "paper" else ""
    chosen = () if plan.held_out is None else plan.held_out.parts
    strength = "tuned" if "guidance" in chosen else f"{plan.settings.guidance:g}"
    name += f"-label_{protocol['label']}-{strength}" if protocol["label"] is not None else ""
    name += f"-{protocol['choices']}" if protocol["choices"] != "generate" else ""
    about = {"task": plan.task.name, "split": options.split or plan.task.split, "limit": options.limit}
    about |= {"shots": options.shots, "model": found.base_name, "dtype": found.base.dtype, "step": step}
    about["fingerprint"] = {**model, "problems": plan.digest}
    if found.base.dtype == "float32":  # in other dtypes, answers depend on the shape of a batch
        del protocol["batch_size"]  # so an evaluation may continue with a smaller batch if memory was short
    decode = dataclasses.asdict(plan.settings)
    if found.base.dtype == "float32" or plan.settings.parallel == "auto":
        del decode["parallel"]
    if plan.settings.end == 1:
        del decode["end"]  # results of earlier versions have no such option, and can be continued
    about |= {"decode": decode, "asking": protocol}
    if plan.search is not None:
        about["search"] = dataclasses.asdict(plan.search)
        name += _search_name(plan.search) + ("-tuned" if "search" in chosen else "")
    if plan.held_out is not None:
        about["tune"] = plan.held_out.record()
    return Results(results_folder(options) / plan.task.name / (options.name or name), about)


def _search_name(search: SearchConfig) -> str:
    """The part of a folder's name that says how beams are searched, without options that have their defaults."""
    usual = SearchConfig()
    others = {name: value for name in SEARCH_OPTIONS if (value := getattr(search, name)) != getattr(usual, name)}
    return f"-beams_{search.beams}" + "".join(f"-{name}_{value:g}" for name, value in others.items())


def results_folder(options: Namespace) -> Path:
    """The folder that contains a folder for each task."""
    return Path(options.out or options.workdir / "eval")
