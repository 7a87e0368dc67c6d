"""Compares models on the same held-out answers: `python -m l2d_jax.study --config FILE --out DIR --models NAME=MODEL`.

A model is a workdir of training, a model folder, a hub id or a GGUF file. Every token of an answer is predicted with
the true tokens before it: by the language model alone, which is a budget of 1, and where there is a path, with each
solver at each budget. The measurements of a model are kept in `DIR/NAME.json`, so that the same command again measures
only the models that lack one. Gains are over the first model.

With `--answers N`, N problems whose answers end in `#### x` are also answered from the prompt alone: greedily at each
budget, by the majority of samples, and by beam search. Their accuracy is drawn against the compute that an answer took.
"""

import dataclasses
import json
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from l2d_jax import command_line
from l2d_jax.command_line import file_name, folder_or_bucket, model_name
from l2d_jax.config import config_file
from l2d_jax.config.config_file import override_names
from l2d_jax.config.schema import Config
from l2d_jax.data import rows
from l2d_jax.data.examples import Examples
from l2d_jax.data.tokenizer import require_tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import ADAPTIVE, AMPLE, SOLVERS, split_budget
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
from l2d_jax.training.exact_match import MarkedProblems
from l2d_jax.training.validation import placed_in_order, teacher_forced_sums

BUDGETS = [1, 3, 7, 15, 31]
INSTEAD = {  # what stands for options of `DecodeConfig`, which a study chooses itself
    "solver": "use --solvers",
    "budget": "use --budgets",
    "guidance": "held-out answers have no label; leave it out",
    "temperature": "answers are greedy, and the samples of a majority have their own; leave it out",
    "max_new_tokens": "answers are as long as the right ones may be; leave it out",
}
BUDGETS_HELP = "evaluations per token; a solver that cannot spend one exactly takes the next smaller that it can"


def main() -> None:
    """Parse the command line, measure every model, and compare."""
    parser = command_line.Parser(prog="python -m l2d_jax.study", description=__doc__)
    parser.add_argument("--models", nargs="+", type=_named, metavar="NAME=MODEL", required=True, help="to compare")
    parser.add_argument("--config", required=True, help=f"for its data, decoding and type; {config_file.CONFIG_HELP}")
    parser.add_argument("--out", type=folder_or_bucket, required=True, help="where the results go")
    parser.add_argument("--split", type=file_name, help="of the answers; None: the config's for validation")
    parser.add_argument("--solvers", nargs="+", choices=SOLVERS, default=["midpoint"], help="of a path")
    parser.add_argument("--budgets", nargs="+", type="Budget", help=f"{BUDGETS_HELP}; None: {BUDGETS}")
    parser.add_argument("--answers", type="CountOrZero", default=0, help="problems to answer freely; 0: none")
    parser.add_argument("--samples", nargs="+", type="Draws", default=[], help="of which the majority is the answer")
    parser.add_argument("--beams", nargs="+", type="Beams", default=[], help="of a search for the answer")
    options, config = parser.parse_with_config()
    _check_asked(options)
    options.budgets = options.budgets or BUDGETS
    names = [name for name, _ in options.models]
    require(len(set(names)) == len(names), f"each model needs a name of its own, got {', '.join(names)}")
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
        if (run := folders[name].trained) is not None:  # which may have changed the language model itself
            trained = costs.trainable_parameters(run, loaded.model.llm.architecture)
        examples, problems = _read_answers(loaded.tokenizer, config, options.answers)
        found = {"about": about[name], "trained": trained, **_measure_model(loaded, examples, config, options, mesh)}
        found["answers"] = [] if problems is None else _answer(loaded, problems, config, options)
        if processes.is_first():
            write_whole(files[name], json.dumps(found, indent=1) + "\n")
            mirror.publish(options.out)
    if processes.is_first():
        study.report_study(options.out, {name: study.read_measurements(file) for name, file in files.items()})


def _check_asked(options: Namespace) -> None:
    """Raise `InputError` for an option that was given, and that nothing here depends on."""
    overrides = override_names(options.overrides, "decode")
    for name, remedy in INSTEAD.items():
        require(name not in overrides, f"--config.decode.{name} changes nothing here: {remedy}")
    fixed = [solver for solver in options.solvers if solver not in ADAPTIVE]
    rule = f"--config.decode.tolerance is of adaptive solvers ({', '.join(ADAPTIVE)})"
    require("tolerance" not in overrides or fixed != options.solvers, f"{rule}: name one, or leave it out")
    rule = "an adaptive solver spends what its tolerance asks for, whatever the --budgets"
    require(fixed != [] or options.budgets is None, f"{rule}: leave them out, or name a solver with fixed steps")
    if options.answers:
        first = options.solvers[0]
        require(first in fixed, f"--answers are compared by what a budget costs: name another solver before {first}")
        return
    given = [f"--{name}" for name in ("samples", "beams") if getattr(options, name)]
    given += [f"--config.decode.{name}" for name in ("top_k", "top_p", "draws", "gate") if name in overrides]
    require(not given, f"{', '.join(given)} belong to free answers: give --answers too, or leave them out")


def _named(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not (model and name.isidentifier()):
        raise ArgumentTypeError(f"{text!r} is not NAME=MODEL, such as base=Qwen/Qwen2.5-7B-Instruct")
    return file_name(name), model_name(model)


def _describe(folder: Folder, options: Namespace, config: Config) -> dict[str, Any]:
    """All that a model's measurements depend on, as JSON; raises `InputError` before any weight is loaded."""
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
    """The held-out answers, and `count` problems to answer freely, None for 0; raises `InputError`."""
    tokenizer = require_tokenizer(tokenizer)
    examples = Examples.load(config.data, tokenizer, split=config.data.validation_split)
    return examples, MarkedProblems.read(config.data, tokenizer, count=count, option="--answers") if count else None


def _is_known(file: Path, about: dict[str, Any]) -> bool:
    """Whether a file holds a model's measurements; raises `InputError` if their conditions differ."""
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
    """The sums of every measure by example, and the settings that were measured."""
    settings = {"1": dataclasses.replace(config.decode, solver="euler", budget=1)}
    if loaded.model.path is not None:
        for solver in options.solvers:
            reached = {AMPLE}  # of an adaptive solver, which is measured once
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


if __name__ == "__main__":
    command_line.run(main)
