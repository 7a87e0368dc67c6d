"""Measures models on the same held-out answers, and compares them."""

import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import Config
from l2d_jax.data import rows
from l2d_jax.data.examples import Examples
from l2d_jax.data.tokenizer import require_tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import ADAPTIVE, AMPLE, split_budget
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.decoding.trace import mean_evaluations
from l2d_jax.distributed import processes, runtime
from l2d_jax.distributed.memory import parameters
from l2d_jax.errors import require
from l2d_jax.evaluation.strategies import answer_problems, strategies
from l2d_jax.files import changes, write_whole
from l2d_jax.loading import Folder, find, load, model_fingerprint, newest_step
from l2d_jax.performance import costs
from l2d_jax.reports import study
from l2d_jax.storage import mirror
from l2d_jax.training.held_out.exact_match import MarkedProblems
from l2d_jax.training.held_out.validation import placed_in_order, teacher_forced_sums


def run(options: Namespace, config: Config) -> None:
    """Measure every model that has no file of measurements yet, and compare."""
    names = [name for name, _ in options.models]
    if options.split:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, validation_split=options.split))
    rows.keep_quiet()
    texts: Any = {name: getattr(config.model, name) for name in ("tokenizer", "chat_template")}
    folders = {name: find(model, dtype=config.model.dtype, **texts) for name, model in options.models}
    mesh = runtime.start_jax(config.mesh)
    options.out.mkdir(parents=True, exist_ok=True)
    about = {name: _describe(folder, options, config) for name, folder in folders.items()}
    files = {name: options.out / f"{name}.json" for name in names}
    missing = [(name, model) for name, model in options.models if not _is_known(files[name], about[name])]
    for name, model in missing:
        processes.print_once(f"measuring {name}: {model}")
        loaded = load(model, mesh=mesh, dtype=config.model.dtype, **texts, step=about[name]["step"])
        trained = 0 if loaded.model.path is None else parameters(loaded.model.path)
        if (run := folders[name].trained) is not None:  # the run may have changed the language model itself
            trained = costs.trainable_parameters(run, loaded.model.llm.architecture)
        examples, problems = _read_answers(loaded.tokenizer, config, options.answers)
        found = {"about": about[name], "trained": trained, **_measure_model(loaded, examples, config, options, mesh)}
        found["answers"] = [] if problems is None else _answer(loaded, problems, config, options)
        if processes.is_first():
            write_whole(files[name], json.dumps(found, indent=1) + "\n")
            mirror.publish(options.out)
    if processes.is_first():
        study.report_study(options.out, {name: study.read_measurements(file) for name, file in files.items()})


def _describe(folder: Folder, options: Namespace, config: Config) -> dict[str, Any]:
    """Everything that determines a model's measurements, as JSON; raises `InputError` before weights are loaded."""
    base, step = folder.find_base(), newest_step(folder)
    model = processes.decide(lambda: model_fingerprint(folder, base, step))
    examples, _ = processes.take_turns(lambda: _read_answers(base.tokenizer, config, options.answers))
    about: dict[str, Any] = {"model": mirror.shown_places(str(folder.path)), "step": step}
    about |= {"fingerprint": model | {"answers": examples.fingerprint()}}
    about |= {name: getattr(options, name) for name in ("solvers", "budgets")}
    about |= {"ways": [options.answers, options.samples, options.beams]}
    about |= {name: dataclasses.asdict(getattr(config, name)) for name in ("data", "decode")}
    if config.decode.parallel == "auto":  # earlier measurements do not name it
        del about["decode"]["parallel"]
    return json.loads(json.dumps(about))


def _read_answers(
    tokenizer: PreTrainedTokenizerFast | None, config: Config, count: int
) -> tuple[Examples, MarkedProblems | None]:
    """The held-out answers, and `count` problems to answer from the prompt alone (None for 0); raises `InputError`."""
    tokenizer = require_tokenizer(tokenizer)
    examples = Examples.load(config.data, tokenizer, split=config.data.validation_split)
    return examples, MarkedProblems.read(config.data, tokenizer, count=count, option="--answers") if count else None


def _is_known(file: Path, about: dict[str, Any]) -> bool:
    """Whether a file has a model's measurements; raises `InputError` if their conditions differ."""
    if (before := processes.decide(lambda: study.read_measurements(file)["about"] if file.exists() else None)) is None:
        return False
    names = [name for name in about if about[name] != before.get(name) and name != "fingerprint"]
    names = names or changes(before.get("fingerprint", {}), about["fingerprint"])
    problem = f"{file} was measured with another {' and '.join(names) or 'version'}"
    require(not names and "fingerprint" in before, f"{problem}: remove it, or take another --out")
    return True


def _measure_model(
    loaded: LoadedModel, examples: Examples, config: Config, options: Namespace, mesh: Mesh
) -> dict[str, Any]:
    """Measure a model: sums of every measure per example, and the settings that were measured."""
    settings = {"1": dataclasses.replace(config.decode, solver="euler", budget=1)}
    if loaded.model.path is not None:
        for solver in options.solvers:
            reached = {AMPLE}  # an adaptive solver is measured once
            if solver not in ADAPTIVE:
                reached = {split_budget(solver, budget, beams=1) for budget in options.budgets} - {1}
            decodes = [dataclasses.replace(config.decode, solver=solver, budget=budget) for budget in sorted(reached)]
            settings |= {f"{solver}-{one.budget}": one for one in decodes}
    measured = []
    for key, one in settings.items():
        spent: Any = one.budget
        if one.solver in ADAPTIVE:
            prompts, answers = zip(*examples.texts(), strict=True)
            spent = mean_evaluations(loaded, Request(number_prompts(prompts), one), answers)
        evaluations, solver = float(np.mean(spent)), "" if key == "1" else one.solver
        measured.append({"key": key, "solver": solver, "evaluations": evaluations})
    batches = placed_in_order(examples, config.validation.batch_size, mesh)
    refinements = {key: Refinement.from_config(one) for key, one in settings.items()}
    sums = teacher_forced_sums(loaded.model, batches, config, refinements, corrections=True)
    means = {key: sums.mean(f"loss@{key}")[0] for key in settings}
    broken = [key for key, mean in means.items() if not np.isfinite(mean)]
    require(not broken, f"the loss at {', '.join(broken)} is not a number: check the weights, or use float32")
    return {"settings": measured, "tally": sums.to_dict()}


def _answer(loaded: LoadedModel, problems: MarkedProblems, config: Config, options: Namespace) -> list[dict[str, Any]]:
    solver, size = options.solvers[0], config.validation.exact_batch_size
    loaded = dataclasses.replace(loaded, defaults=dataclasses.replace(config.decode, solver=solver))
    budgets = sorted({split_budget(solver, budget, beams=1) for budget in options.budgets})
    tried = strategies(budgets, options.samples, options.beams, has_path=loaded.model.path is not None)
    return [answer_problems(loaded, problems, one, batch_size=size)._asdict() for one in tried]
