"""The Python interface: a model that has been opened, and answers.

    model = l2d_jax.load("runs/quickstart")
    model.generate("What is 12 * 4?", budget=15)

A prompt is one of three things. Text is a message of a user, and is put by the tokenizer's chat template. A
conversation is a list of messages, each a dictionary with a role and a content. A list of token ids is taken as it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any

from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.messages import Message
from l2d_jax.data.tokenizer import prompt_ids, require_tokenizer, text_ids
from l2d_jax.decoding.generation import decode_lanes, generate_answers
from l2d_jax.decoding.grammar import Grammar
from l2d_jax.decoding.likelihood import Likelihood, score_answers
from l2d_jax.decoding.requests import SAMPLING_OPTIONS, Request, Restrictions, number_prompts, override_settings
from l2d_jax.decoding.sampler import check_tokens
from l2d_jax.decoding.stop_strings import GrowingText, to_text
from l2d_jax.distributed.memory import device_bytes
from l2d_jax.errors import InputError, require
from l2d_jax.model.l2d import Model

OnePrompt = str | Sequence[Message] | Sequence[int]
Answer = str | list[int]

# Options that no `DecodeConfig` has.
PENALTIES = ("frequency_penalty", "presence_penalty", "logit_bias")
OTHER_OPTIONS = ("seed", "samples", "label", "stop", "allowed", "banned", "response_format", "settings", *PENALTIES)


@dataclass(frozen=True)
class LoadedModel:
    """A language model, with or without a diffusion path, that is ready to generate.

    All methods take the options of `DecodeConfig` by name: budget, solver, temperature, top_k, top_p, max_new_tokens,
    guidance, gate and so on. What is left out is as in `defaults`; a list has a value for each prompt.
    """

    model: Model = field(repr=False)  # the language model and the path
    tokenizer: PreTrainedTokenizerFast | None = field(repr=False)
    stop_ids: tuple[int, ...]  # tokens that end an answer
    defaults: DecodeConfig  # how the model was validated while it was trained
    step: int | None = None  # of the checkpoint; None: the weights come from no checkpoint

    @cached_property
    def decoder(self) -> Model:
        """The model as `Model.merged` has it in the memory of the devices."""
        return self.model.merged(device_bytes())

    def generate(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        *,
        seed: int = 0,
        samples: int | None = None,
        label: int | Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        allowed: Sequence[int] | None = None,
        banned: Sequence[int] = (),
        settings: DecodeConfig | None = None,
        **options: Any,
    ) -> Answer | list[Answer] | list[list[Answer]]:
        """Answer one prompt or several: text with text, token ids with token ids without the stop token.

            model.generate("What is 12 * 4?")                     # "48"
            model.generate(["Hi", "2 + 2?"], budget=31, seed=1)   # two answers
            model.generate([[1, 2, 3]], samples=4, temperature=1.0, max_new_tokens=20)

        An answer depends on the seed and on the prompt's place in the list, and not on the other prompts.

        Args:
          prompts: a prompt, or a list of prompts.
          seed: of the noise and of the sampled tokens.
          samples: so many answers to each prompt, as a list; None: a single answer.
          label: class for guidance, for all prompts or one for each.
          stop: strings or special tokens that end an answer, and are left out of it.
          allowed: token ids that may be sampled; None: all.
          banned: token ids that may not be sampled.
          settings: in place of `defaults`.
          options: changes of single settings; `response_format`, what answers have to be: JSON of a schema, a
            regular expression or one of several choices, as `grammar.Grammar.compile` reads it; and OpenAI's
            `frequency_penalty`, `presence_penalty` (of tokens that the answer has) and `logit_bias` (by token id).

        Raises:
          InputError: for an unknown option, with the nearest name; for values that the model or the solver does not
            know; for text where the model has no tokenizer or its tokenizer no chat template; for prompts that are
            empty or too long; and if logits are not numbers.
        """
        many, is_single = _as_list(prompts)
        count = 1 if samples is None else samples
        restrictions = self._restrict(stop, options)._replace(allowed=allowed, banned=banned)
        request = self._request(many, label, settings, options, seed=seed, samples=count, restrictions=restrictions)
        answers = generate_answers(self.decoder, request)
        shown = [
            to_text(ids, self.tokenizer) + rest if _is_text(many[i // count]) else ids
            for i, (ids, rest) in enumerate(answers)
        ]
        results: list[Any] = shown if samples is None else [shown[i : i + count] for i in range(0, len(shown), count)]
        return results[0] if is_single else results

    def stream(
        self,
        prompt: OnePrompt,
        *,
        seed: int = 0,
        label: int | None = None,
        stop: str | Sequence[str] = (),
        settings: DecodeConfig | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Yield the answer to one prompt as pieces of text, each complete in UTF-8.

            for piece in model.stream([{"role": "user", "content": "Hi"}], temperature=0.7):
                print(piece, end="", flush=True)

        Arguments and errors are those of `generate`; errors are raised when the first piece is asked for.
        """
        text = GrowingText(require_tokenizer(self.tokenizer))
        restrictions = self._restrict(stop, options)
        request = self._request([prompt], label, settings, options, seed=seed, restrictions=restrictions)
        for [piece] in decode_lanes(self.decoder, request):
            yield text.add(piece.tokens, is_last=piece.is_last, rest=piece.rest)

    def score(
        self,
        prompts: OnePrompt | Sequence[OnePrompt],
        answers: Answer | Sequence[Answer],
        *,
        draws: int = 8,
        seed: int = 0,
        label: int | Sequence[int] | None = None,
        settings: DecodeConfig | None = None,
        **options: Any,
    ) -> Likelihood | list[Likelihood]:
        """Log-likelihoods of answers in nats, with their standard errors.

            model.score("What is 12 * 4?", "48").total
            model.score("What is 12 * 4?", ["48", "46"], draws=32)   # both under the same noise

        Answers are one, several to the single prompt, or one for each prompt of the list. Text is scored as it stands;
        for the token that ends an answer, give token ids. `draws` are noise samples per token, at least 2; the other
        arguments are those of `generate`, but for `SAMPLING_OPTIONS`.
        Raises `InputError` as `generate`, and for lists of different lengths or answers without tokens.
        """
        many, is_single = _as_list(prompts)
        texts, is_one = _as_list(answers)
        for name in SAMPLING_OPTIONS:
            require(name not in options, f"a likelihood does not depend on {name}: leave it out")
        request = self._request(many, label, settings, options, seed=seed)
        require(not any(prompt.settings for prompt in request.prompts), "likelihoods have one value of each option")
        request = replace(request, prompts=[*request.prompts] * len(texts)) if is_single else request
        ids = [text_ids([one], require_tokenizer(self.tokenizer))[0] if isinstance(one, str) else one for one in texts]
        likelihoods = score_answers(self.model, request, ids, draws=draws)
        return likelihoods[0] if is_single and is_one else likelihoods

    def _request(
        self,
        prompts: Sequence[Any],
        label: int | Sequence[int] | None,
        settings: DecodeConfig | None,
        options: Mapping[str, Any],
        **others: Any,
    ) -> Request:
        """The prompts as token ids, numbered, and all that is asked of them; raises `InputError` as `generate` does."""
        ids = [self._encode(prompt) for prompt in prompts]
        numbered = number_prompts(ids, labels=[label] * len(ids) if isinstance(label, int) else label)
        chosen = self.defaults if settings is None else settings
        several = {name: values for name, values in options.items() if isinstance(values, list)}
        for name, values in several.items():
            require(len(values) == len(ids), f"{name} has {len(values)} values for {len(ids)} prompts: give as many")
        single = {name: value for name, value in options.items() if name not in several}
        common = override_settings(chosen, single, others=OTHER_OPTIONS)
        for i, prompt in enumerate(numbered if several else ()):
            own = {name: values[i] for name, values in several.items()}
            numbered[i] = prompt._replace(settings=override_settings(common, own, others=OTHER_OPTIONS))
        asked = {*options} if label is None else {*options, "label"}
        if settings is not None and settings.guidance != self.defaults.guidance:  # which needs a label
            asked.add("guidance")
        return Request(numbered, common, stop_ids=self.stop_ids, tokenizer=self.tokenizer, asked=asked, **others)

    def compile_grammar(self, response_format: Any) -> Grammar | None:
        """What answers have to be, for this model; None and errors are those of `Grammar.compile`."""
        size = self.model.llm.architecture.vocab_size
        return Grammar.compile(response_format, self.tokenizer, vocab_size=size, stop_ids=self.stop_ids)

    def _restrict(self, stop: str | Sequence[str], options: dict[str, Any]) -> Restrictions:
        """The restrictions among the options, which are taken out of them."""
        grammar = self.compile_grammar(options.pop("response_format", None))
        penalties = {name: options.pop(name) for name in PENALTIES if name in options}
        return Restrictions([stop] if isinstance(stop, str) else stop, grammar=grammar, **penalties)

    def _encode(self, prompt: Any) -> list[int]:
        if hasattr(prompt, "__len__"):
            if _is_text(prompt):
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                return prompt_ids(messages, require_tokenizer(self.tokenizer))
            if all(isinstance(token, Integral) for token in prompt):
                ids = [int(token) for token in prompt]
                check_tokens([ids], self.model.llm.architecture.vocab_size)
                return ids
        raise InputError(f"a prompt is text, a list of messages or a list of token ids, got {prompt!r}")


def _is_text(prompt: Any) -> bool:
    """Whether a prompt is text or a conversation, rather than token ids."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))


def _as_list(values: Any) -> tuple[Sequence[Any], bool]:
    """One value or several as a list, and whether it was one."""
    is_list = hasattr(values, "__len__") and not _is_text(values)
    is_single = not is_list or (len(values) > 0 and isinstance(values[0], Integral))
    return ([values] if is_single else values), is_single
