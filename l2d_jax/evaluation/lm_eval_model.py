"""A model as lm-evaluation-harness asks one: for continuations of texts, and for the likelihood of given ones.

Texts become tokens as in the harness's own class for Hugging Face models, so that results can be compared: a text is
read with the special tokens that the tokenizer adds, unless it begins with one as chat templates write them; a
continuation is what the tokens of both texts have beyond those of the first; what exceeds the model's positions is left
out at the beginning. The likelihood is that of the path, by the mean over several draws of noise, or that of the base.

Noise depends on a request's own text: results depend neither on batches nor on what else is asked, and all options of a
question are compared under the same noise.
"""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jinja2
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import DATE, encode, first_line, require_chat_template
from l2d_jax.decoding.batching import Prompt, batches, complete
from l2d_jax.decoding.generation import Loaded, Restrictions
from l2d_jax.decoding.likelihood import score
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError

NEW_TOKENS = 256  # of an answer, where a task does not say
OF_DECODING = ("top_k", "top_p", "temperature")
KNOWN = {"until", "do_sample", "max_gen_toks", *OF_DECODING}


class Asking(NamedTuple):
    """How the model is asked."""

    settings: DecodeConfig  # of generation; tasks choose temperature, top-k, top-p and length
    scoring: DecodeConfig  # of likelihoods
    draws: int = 8  # of noise, for each likelihood
    batch_size: int = 16  # sequences
    max_new_tokens: int | None = None  # of an answer, at most; None: as the task says
    seed: int = 0


class Generation(NamedTuple):
    """What a task asks of its answers."""

    settings: DecodeConfig
    until: tuple[str, ...]  # texts that end an answer, and are no part of it


def read_generation(options: Mapping[str, Any], asking: Asking) -> Generation:
    """The `generation_kwargs` of a task; raises `InputError` for one that is not known here."""
    given = normalize_gen_kwargs(dict(options), NEW_TOKENS)
    unknown = sorted(given.keys() - KNOWN)
    if unknown:
        known = ", ".join(sorted(KNOWN))
        raise InputError(
            f"the task's generation option {unknown[0]} is not known here: leave it out; known are {known}"
        )
    length = min(given["max_gen_toks"], asking.max_new_tokens or given["max_gen_toks"])
    drawing = {"temperature": 0.0, "top_k": 0, "top_p": 1.0} | {k: given[k] for k in OF_DECODING if k in given}
    settings = replace(asking.settings, **drawing, max_new_tokens=length)
    return Generation(settings, tuple(text for text in given["until"] if text))


class Harness(TemplateLM):  # type: ignore[misc, unused-ignore]  # of type Any where lm_eval is not installed
    """Answers the three kinds of requests."""

    def __init__(self, loaded: Loaded, *, asking: Asking) -> None:
        """Raises `InputError` for a model without a tokenizer, and for one without a token to begin texts with."""
        super().__init__()
        self.tokenizer = require_tokenizer(loaded.tokenizer)
        self._loaded = loaded
        self._asking = asking
        self._positions = loaded.model.llm.architecture.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text without context begins with: the tokenizer's first token, else its last."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as text; without its system messages where the template knows none.

        Raises `InputError` where there is no template, and where it refuses the conversation.
        """
        require_chat_template(self.tokenizer)
        spoken = [message for message in chat_history if message["role"] != "system"]
        for messages in (chat_history, spoken):
            try:
                return str(
                    self.tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        continue_final_message=not add_generation_prompt,
                        date_string=DATE,
                    )
                )
            except jinja2.TemplateError as error:
                refusal = first_line(error)
        raise InputError(f"the chat template refuses a prompt of the task: {refusal}: leave out --apply_chat_template")

    def tok_encode(self, string: str, *, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; None: with the tokenizer's special tokens, unless the text begins with them already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    def generate_until(self, requests: list[Instance], *, disable_tqdm: bool = False) -> list[str]:
        """Continuations of texts, each up to the first of its task's `until`; raises `InputError` as `complete`."""
        groups: dict[str, list[int]] = defaultdict(list)  # requests by their settings
        for index, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(index)
        texts: dict[int, str] = {}
        with processes.progress_bar(len(requests), "answers", is_silent=disable_tqdm) as bar:
            for group in groups.values():
                asked = read_generation(requests[group[0]].args[1], self._asking)
                room = self._positions - asked.settings.max_new_tokens
                if room < 1:
                    raise InputError(
                        f"{asked.settings.max_new_tokens} new tokens leave no room for a prompt in the "
                        f"{self._positions} positions of the model: give fewer by --max_new_tokens"
                    )
                prompts = [self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in group]
                numbers = _own_numbers(prompts)
                places = dict(zip(numbers, group, strict=True))
                stops, ends = self._split(asked.until)
                for batch in complete(
                    self._loaded._replace(ends=tuple(dict.fromkeys((*self._loaded.ends, *ends)))),
                    [Prompt(number, ids[-room:]) for number, ids in zip(numbers, prompts, strict=True)],
                    settings=asked.settings,
                    batch_size=self._asking.batch_size,
                    seed=self._asking.seed,
                    restrictions=Restrictions(stops=stops, keeps_stop=True),
                ):
                    for number, [answer] in batch.items():
                        texts[places[number]] = cut(to_text(answer, self.tokenizer), asked.until)
                    bar.update(len(batch))
        return [texts[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], *, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts; long ones in windows, each token once with what context has room."""
        windows = [
            (index, None, *make_disjoint_window(window))
            for index, request in enumerate(requests)
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._positions,
                context_len=1,
            )
        ]
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens([window[1:] for window in windows], disable_tqdm=disable_tqdm)
        for (index, *_), (total, _) in zip(windows, found, strict=True):
            totals[index] += total
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        *,
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each (text, context, continuation), and whether each of its tokens is the likeliest."""
        found: dict[int, tuple[float, bool]] = {}
        lengths = [len(context) + len(answer) for _, context, answer in requests]
        with processes.progress_bar(len(requests), "likelihoods", is_silent=disable_tqdm) as bar:
            for batch, rows in batches(lengths, self._asking.batch_size):
                contexts, answers = zip(*(requests[i][1:] for i in rows), strict=True)
                scores = score(
                    self._loaded,
                    [self._shorten(c, len(a)) for c, a in zip(contexts, answers, strict=True)],
                    answers,
                    settings=self._asking.scoring,
                    draws=self._asking.draws,
                    # Where there is no context but the first token, the answer tells one text from the next.
                    numbers=[
                        noise_number(c if len(c) > 1 else [*c, *a]) for c, a in zip(contexts, answers, strict=True)
                    ],
                    seed=self._asking.seed,
                )
                for i, answer, one in zip(batch, answers, scores, strict=False):
                    found[i] = one.total, one.likeliest.tolist() == list(answer)
                bar.update(len(batch))
        return [found[index] for index in range(len(requests))]

    def _shorten(self, context: list[int], answer: int) -> list[int]:
        """The end of a context that has room before so many tokens, the last of which needs none."""
        room = self._positions + 1 - answer
        if room < 1:
            raise InputError(f"a continuation of {answer} tokens exceeds the {self._positions} positions of the model")
        return context[-room:]

    def _split(self, until: Sequence[str]) -> tuple[list[str], list[int]]:
        """Which texts to look for in answers, and which are special tokens, that end them; the rest only cuts them."""
        stops, ends = [], []
        for text in until:
            ids = encode([text], self.tokenizer)[0]
            if to_text(ids, self.tokenizer) == text:
                stops.append(text)
            elif ids[0] in self.tokenizer.added_tokens_decoder:
                ends.append(ids[0])
        return stops, ends


def require_tokenizer(tokenizer: PreTrainedTokenizerFast | None) -> PreTrainedTokenizerFast:
    """The tokenizer; raises `InputError` where there is none, or none with a token to begin texts with."""
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: add its tokenizer files, the tasks are texts")
    if tokenizer.eos_token_id is None:
        raise InputError("the tokenizer has no eos_token, which ends texts: name one in tokenizer_config.json")
    return tokenizer


def cut(text: str, until: Sequence[str]) -> str:
    """A text up to the first of some others."""
    return text[: min((place for place in map(text.find, until) if place >= 0), default=len(text))]


def noise_number(ids: Sequence[int]) -> int:
    """The number, in `generation.stream`'s sense, of a text: its noise depends on nothing else."""
    return zlib.crc32(np.array(ids, np.int32).tobytes()) >> 1  # of 31 bits


def _own_numbers(prompts: Sequence[Sequence[int]]) -> list[int]:
    """A number of each prompt, none like another; those of one text, repeated, depend on which repetition it is."""
    seen: Counter[tuple[int, ...]] = Counter()
    taken: dict[int, None] = {}
    for ids in prompts:
        number = noise_number([*ids, seen[tuple(ids)]])
        seen[tuple(ids)] += 1
        while number in taken:
            number = (number + 1) % 2**31
        taken[number] = None
    return list(taken)
