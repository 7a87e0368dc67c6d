"""A model as lm-evaluation-harness uses it: it continues texts, and gives the likelihoods of continuations.

Texts become tokens as in the harness's own class for Hugging Face models. Noise depends on a request's text alone: so
batches and other requests change a result's rounding alone (`generation` says how much), and all options of a question
are compared under the same noise.
"""

import dataclasses
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from l2d_jax.config.parsing import require
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import first_line, render_chat, require_chat_template, require_tokenizer, text_ids
from l2d_jax.decoding.batching import complete, plan_batches
from l2d_jax.decoding.likelihood import score_answers
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refine import check_budget
from l2d_jax.decoding.requests import Prompt, Request, Restrictions, override_settings
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.loading import find, load

CHANGES = ("budget", "solver", "tolerance")  # options that are settings of decoding
LIMITS = ("draws", "batch_size", "max_new_tokens", "seed")
SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}  # options of a task, with their defaults
KNOWN = {"until", "do_sample", "max_gen_toks", *SAMPLING}


@dataclass(frozen=True)
class HarnessOptions:
    """How the model answers, whatever the task."""

    settings: DecodeConfig  # of generation; tasks choose temperature, top-k, top-p and length
    scoring: DecodeConfig  # of likelihoods
    draws: int = 8  # noise samples for each likelihood
    batch_size: int = 16  # sequences
    max_new_tokens: int | None = None  # a limit of an answer's length in tokens; None: the task's
    seed: int = 0


def parse_generation(kwargs: Mapping[str, Any], options: HarnessOptions) -> tuple[DecodeConfig, tuple[str, ...]]:
    """A task's `generation_kwargs` as settings, and texts that end answers; raises `InputError` for unknown ones."""
    kwargs = normalize_gen_kwargs(dict(kwargs))
    for name in sorted(kwargs.keys() - KNOWN):
        known = ", ".join(sorted(KNOWN))
        raise InputError(f"the task's generation option {name} is not known here: leave it out; known are {known}")
    length = min(kwargs["max_gen_toks"], options.max_new_tokens or kwargs["max_gen_toks"])
    sampling = {name: kwargs.get(name, default) for name, default in SAMPLING.items()}
    settings = dataclasses.replace(options.settings, **sampling, max_new_tokens=length)
    return settings, tuple(text for text in kwargs["until"] if text)


class LmEvalModel(TemplateLM):  # type: ignore[misc, unused-ignore]  # of type Any where lm_eval is not installed
    """Answers the harness's three kinds of requests."""

    def __init__(self, loaded: LoadedModel, *, options: HarnessOptions) -> None:
        super().__init__()
        self.tokenizer = require_tokenizer(loaded.tokenizer)
        problem = "the tokenizer has no eos_token, which ends texts: name one in tokenizer_config.json"
        require(self.tokenizer.eos_token_id is not None, problem)
        self._loaded = loaded
        self._options = options
        self._positions = loaded.model.llm.architecture.max_position_embeddings

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "LmEvalModel":
        """Open a model as the harness asks for it, with the options of the program `lm_eval`; raises `InputError`."""
        given = arg_dict | (additional_config or {})
        folder = find(given["model"], dtype=given.get("dtype"))
        settings = override_settings(folder.defaults, {option: given[option] for option in CHANGES if option in given})
        scoring = dataclasses.replace(settings, budget=1, solver="euler") if given["likelihood"] == "base" else settings
        check_budget(settings, has_path=folder.path_config is not None)
        options = HarnessOptions(settings, scoring, **{option: given[option] for option in LIMITS if option in given})
        loaded = load(given["model"], dtype=given.get("dtype"), rows=options.batch_size)
        os.environ["LOCAL_RANK"] = str(jax.process_index())  # by which the harness knows that process 0 alone writes
        return cls(loaded, options=options)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes of the model into its results."""
        return dataclasses.asdict(self._options) | {"step": self._loaded.step}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the one that begins texts, or else the one that ends them."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness caches prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as text, without its system messages where the template refuses them; raises `InputError`."""
        require_chat_template(self.tokenizer)
        without_system = [message for message in chat_history if message["role"] != "system"]
        for messages in (chat_history, without_system):
            try:
                continued = not add_generation_prompt
                return render_chat(messages, self.tokenizer, prompt=add_generation_prompt, continued=continued)
            except InputError as error:
                refusal = first_line(error)
        raise InputError(f"the chat template refuses a prompt of the task: {refusal}: leave out --apply_chat_template")

    def tok_encode(self, string: str, *, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The token ids of a text; None: with the tokenizer's special tokens, unless the text begins with one."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Continue texts, each up to the first of its task's `until`; raises `InputError` as `complete` does."""
        groups: dict[str, list[int]] = defaultdict(list)  # requests by their settings
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(index)
        texts, size, seed = [""] * len(requests), self._options.batch_size, self._options.seed
        with processes.progress_bar(len(requests), "answers") as bar:
            for group in groups.values():
                settings, until = parse_generation(requests[group[0]].args[1], self._options)
                longest = self._positions - settings.max_new_tokens
                problem = f"{settings.max_new_tokens} new tokens leave no room for a prompt in the {self._positions}"
                require(longest > 0, f"{problem} positions of the model: give fewer by --max_new_tokens")
                asked, places = [], dict[int, int]()
                for i in group:
                    ids = self.tok_encode(requests[i].args[0]) or [self.prefix_token_id]
                    number = noise_number([*ids, 0])
                    while number in places:  # a text that is repeated has other numbers the second time and so on
                        number = (number + 1) % 2**31
                    places[number] = i
                    asked.append(Prompt(number, ids[-longest:]))
                stops, stop_ids = self._split(until)
                ends = tuple(dict.fromkeys((*self._loaded.stop_ids, *stop_ids)))
                answering = dataclasses.replace(self._loaded, stop_ids=ends)
                how: dict[str, Any] = {"settings": settings, "batch_size": size, "seed": seed}
                for batch in complete(answering, asked, restrictions=Restrictions(stops, keeps_stop=True), **how):
                    for number, [answer] in batch.items():
                        texts[places[number]] = cut_text(to_text(answer, self.tokenizer), until)
                    bar.update(len(batch))
        return texts

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Log-likelihoods of whole texts; long texts are cut into windows, in which each token is scored once."""
        limits = {"prefix_token": self.prefix_token_id, "max_seq_len": self._positions, "context_len": 1}
        windows = [
            (index, None, *make_disjoint_window(window))
            for index, request in enumerate(requests)
            for window in get_rolling_token_windows(token_list=self.tok_encode(request.args[0]), **limits)
        ]
        totals = [0.0] * len(requests)
        likelihoods = self._loglikelihood_tokens([window[1:] for window in windows])
        for (index, *_), (total, _) in zip(windows, likelihoods, strict=True):
            totals[index] += total
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each (text, context, continuation), and whether each of its tokens is the likeliest."""
        likelihoods = [(0.0, False)] * len(requests)
        asked, model = self._options, self._loaded.model
        lengths = [len(context) + len(answer) for _, context, answer in requests]
        with processes.progress_bar(len(requests), "likelihoods") as bar:
            for batch, rows in plan_batches(lengths, asked.batch_size):
                contexts, answers = zip(*(requests[i][1:] for i in rows), strict=True)
                longest = max(map(len, answers))
                refused = f"a continuation of {longest} tokens exceeds the {self._positions} positions of the model"
                require(longest <= self._positions, refused)
                prompts = [
                    # A text without context has the first token as its context, which would be one number for all.
                    Prompt(noise_number(c if len(c) > 1 else [*c, *a]), c[-(self._positions + 1 - len(a)) :])
                    for c, a in zip(contexts, answers, strict=True)
                ]
                scores = score_answers(model, Request(prompts, asked.scoring, asked.seed), answers, draws=asked.draws)
                for i, answer, one in zip(batch, answers, scores, strict=False):
                    likelihoods[i] = one.total, one.likeliest.tolist() == list(answer)
                bar.update(len(batch))
        return likelihoods

    def _split(self, until: Sequence[str]) -> tuple[list[str], list[int]]:
        """Stop strings and stop token ids; a text that mixes ordinary and special tokens only cuts finished answers."""
        stops, stop_ids = [], []
        for text in until:
            ids = text_ids([text], self.tokenizer)[0]
            if to_text(ids, self.tokenizer) == text:
                stops.append(text)
            elif ids[0] in self.tokenizer.added_tokens_decoder:
                stop_ids.append(ids[0])
        return stops, stop_ids


def cut_text(text: str, until: Sequence[str]) -> str:
    """The text before the first place where one of `until` occurs."""
    return text[: min((place for place in map(text.find, until) if place >= 0), default=len(text))]


def noise_number(ids: Sequence[int]) -> int:
    """The number of a `Prompt` of these tokens, so that its noise depends on the text alone."""
    return zlib.crc32(np.array(ids, np.int32).tobytes()) >> 1  # of 31 bits
