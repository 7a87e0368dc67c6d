"""The Python interface: a model that `load` has opened, with methods that generate, score and trace answers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any

from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.prompts import OnePrompt, as_list, has_text
from l2d_jax.data.tokenizer import prompt_ids, require_tokenizer, text_ids
from l2d_jax.decoding.generation import decode_lanes, generate_answers
from l2d_jax.decoding.grammar import Grammar
from l2d_jax.decoding.likelihood import Likelihood, score_answers
from l2d_jax.decoding.requests import SAMPLING_OPTIONS, Request, Restrictions, number_prompts, override_settings
from l2d_jax.decoding.sampler import check_tokens
from l2d_jax.decoding.stop_strings import GrowingText, to_text
from l2d_jax.decoding.tools.call_format import find_call_format
from l2d_jax.decoding.tools.tool_use import FIELDS, ToolUse, take_tool_use
from l2d_jax.decoding.trace import TokenTrace, check_single_sample, trace
from l2d_jax.distributed.memory import device_bytes
from l2d_jax.errors import InputError, require
from l2d_jax.model.l2d import Model

Answer = str | list[int]

# Options that no `DecodeConfig` has.
PENALTIES = ("frequency_penalty", "presence_penalty", "logit_bias")
CALL_OPTIONS = ("seed", "samples", "label", "stop", "allowed", "banned", "response_format", "settings")
OTHER_OPTIONS = (*CALL_OPTIONS, *PENALTIES, *FIELDS)


@dataclass(frozen=True)
class LoadedModel:
    """A language model, with or without a diffusion path, that is ready to generate.

    A prompt is text, a conversation or token ids:

    - text is the message of a user, which the chat template of the tokenizer wraps;
    - a conversation is a list of messages, such as `[{"role": "user", "content": "Hi"}]`;
    - a list of token ids is read as it is, without a template.

    All methods take the options of `config.decode` by name, such as `budget`, `solver`, `temperature`, `gate` and
    `max_new_tokens`. Options that you leave out have the values of `defaults`. For several prompts, the value of an
    option may be a list with an entry for each prompt.

    Attributes:
      model: the language model and the path, two pytrees of arrays.
      tokenizer: the tokenizer, or None if the model folder has none. Then prompts and answers are token ids.
      stop_ids: ids of the tokens that end an answer.
      defaults: the decoding options that validation used during training.
      step: the step of the checkpoint, or None if the weights do not come from a checkpoint.
      is_copied: whether decoding uses a copy, with low-rank updates merged into the weights.
    """

    model: Model = field(repr=False)
    tokenizer: PreTrainedTokenizerFast | None = field(repr=False)
    stop_ids: tuple[int, ...]
    defaults: DecodeConfig
    step: int | None = None
    is_copied: bool = True

    @cached_property
    def decoder(self) -> Model:
        """The copy of the model that decodes: `Model.merged`, if it fits in the memory of the devices."""
        if not self.is_copied:
            return self.model
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
        """Answer one prompt or several prompts.

            model.generate("What is 12 * 4?")                     # "48"
            model.generate(["Hi", "2 + 2?"], budget=31, seed=1)   # two answers
            model.generate([[1, 2, 3]], samples=4, temperature=1.0, max_new_tokens=20)

        Text is answered with text, and token ids with token ids, without the stop token. An answer depends on the seed
        and on the position of its prompt in the list. It does not depend on the other prompts.

        Args:
          prompts: a prompt, or a list of prompts.
          seed: seed of the noise and of the sampled tokens.
          samples: number of answers to each prompt, which come as a list; None: one answer, not in a list.
          label: class for guidance, one for all prompts or a list with one for each.
          stop: strings or special tokens that end an answer. They are not part of the answer.
          allowed: token ids that may be sampled; None: all.
          banned: token ids that may not be sampled.
          settings: decoding options to use instead of `defaults`.
          options: single decoding options by name; `response_format`, a JSON schema, a regular expression or a choice
            that the answer follows, as `Grammar.compile` reads it; and `frequency_penalty`, `presence_penalty`,
            `logit_bias`, `tools`, `tool_choice` and `parallel_tool_calls`, as in OpenAI's API. `parse_tool_calls`
            reads the calls in an answer, which are written as the chat template writes them.

        Returns:
          An answer for a single prompt, and a list of answers for a list.

        Raises:
          InputError: if an option is unknown or its value is not possible for this model and solver; if the prompt is
            text and the model has no tokenizer or no chat template; if a prompt is empty or too long; and if a logit is
            not a number.
        """
        many, is_single = as_list(prompts)
        count, tools = 1 if samples is None else samples, take_tool_use(options)
        restrictions = self._restrict(stop, options, tools)._replace(allowed=allowed, banned=banned)
        given: dict[str, Any] = {"restrictions": restrictions, "tools": tools, "samples": count, "seed": seed}
        answers = generate_answers(self.decoder, self._request(many, label, settings, options, **given))
        markers = self._markers(tools)
        shown = [
            to_text(ids, self.tokenizer, markers=markers) + rest if has_text(many[i // count]) else ids
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
        """Yield the answer to one prompt piece by piece, as text.

            for piece in model.stream([{"role": "user", "content": "Hi"}], temperature=0.7):
                print(piece, end="", flush=True)

        A piece is never cut within a character. The pieces together are the text that `generate` returns for the same
        arguments.

        Args:
          prompt: the prompt.
          seed: seed of the noise and of the sampled tokens.
          label: class for guidance.
          stop: strings or special tokens that end the answer. They are not part of it.
          settings: decoding options to use instead of `defaults`.
          options: as for `generate`.

        Raises:
          InputError: as `generate` does, when the first piece is read.
        """
        tools = take_tool_use(options)
        text = GrowingText(require_tokenizer(self.tokenizer), markers=self._markers(tools))
        given: dict[str, Any] = {"restrictions": self._restrict(stop, options, tools), "tools": tools}
        request = self._request([prompt], label, settings, options, seed=seed, **given)
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
        """Estimate the log-likelihood of answers, in nats, with standard errors.

            model.score("What is 12 * 4?", "48").total
            model.score("What is 12 * 4?", ["48", "46"], draws=32)   # both answers with the same noise

        The probability of a token is the mean over the noise. The mean over `draws` noise samples estimates it. Text is
        scored as it stands, without the token that ends an answer: give token ids to include that token.

        Args:
          prompts: a prompt, or a list of prompts.
          answers: an answer, several answers to a single prompt, or a list with one answer for each prompt.
          draws: noise samples per token, at least 2.
          seed: seed of the noise.
          label: class for guidance, one for all prompts or a list with one for each.
          settings: decoding options to use instead of `defaults`.
          options: single decoding options by name. Options of sampling, such as `temperature` and `top_k`, are errors.

        Returns:
          A `Likelihood` for one answer to one prompt, and otherwise a list of them.

        Raises:
          InputError: as `generate` does; if the lists have different lengths; and if an answer has no tokens.
        """
        many, is_single = as_list(prompts)
        texts, is_one = as_list(answers)
        for name in SAMPLING_OPTIONS:
            require(name not in options, f"a likelihood does not depend on {name}: leave it out")
        request = self._request(many, label, settings, options, seed=seed)
        require(not any(prompt.settings for prompt in request.prompts), "a likelihood takes one value of each option")
        request = replace(request, prompts=[*request.prompts] * len(texts)) if is_single else request
        ids = [text_ids([one], require_tokenizer(self.tokenizer))[0] if isinstance(one, str) else one for one in texts]
        likelihoods = score_answers(self.model, request, ids, draws=draws)
        return likelihoods[0] if is_single and is_one else likelihoods

    def trace(
        self,
        prompt: OnePrompt,
        *,
        seed: int = 0,
        label: int | None = None,
        settings: DecodeConfig | None = None,
        **options: Any,
    ) -> list[TokenTrace]:
        """Answer one prompt, and say what each token of the answer took.

            for token in model.trace("What is 12 * 4?", budget=15):
                print(repr(token.text), token.evaluations, token.settled)

        The answer is that of `generate` for the same arguments. It is then integrated once more, so a trace takes more
        time than the answer alone.

        Args:
          prompt: the prompt.
          seed: seed of the noise and of the sampled tokens.
          label: class for guidance.
          settings: decoding options to use instead of `defaults`.
          options: single decoding options by name; `draws` must be 1.

        Returns:
          A `TokenTrace` for each token of the answer.

        Raises:
          InputError: as `generate` does, and for several noise samples per token.
        """
        request = self._request([prompt], label, settings, options, seed=seed)
        require(request.prompts[0].settings is None, "a trace is of one answer: give one value of each option")
        check_single_sample(request.settings)
        [(ids, _)] = generate_answers(self.decoder, request)
        return trace(self, request, [ids])[0]

    def _request(
        self,
        prompts: Sequence[Any],
        label: int | Sequence[int] | None,
        settings: DecodeConfig | None,
        options: Mapping[str, Any],
        tools: ToolUse | None = None,
        **others: Any,
    ) -> Request:
        """The request for these prompts, as token ids; raises `InputError` as `generate` does."""
        for name in FIELDS:
            require(name not in options, f"{name} is for generate and stream alone: leave it out")
        ids = [self._encode(prompt, tools) for prompt in prompts]
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

    def compile_grammar(self, response_format: Any, *, tools: ToolUse | None = None) -> Grammar | None:
        """Compile a `response_format` and tools for this tokenizer; returns and raises what `Grammar.compile` does."""
        size = self.model.llm.architecture.vocab_size
        options: dict[str, Any] = {"vocab_size": size, "stop_ids": self.stop_ids, "tools": tools}
        return Grammar.compile(response_format, self.tokenizer, **options)

    def _restrict(self, stop: str | Sequence[str], options: dict[str, Any], tools: ToolUse | None) -> Restrictions:
        """Take the restrictions out of `options`."""
        grammar = self.compile_grammar(options.pop("response_format", None), tools=tools)
        penalties = {name: options.pop(name) for name in PENALTIES if name in options}
        return Restrictions([stop] if isinstance(stop, str) else stop, grammar=grammar, **penalties)

    def _markers(self, tools: ToolUse | None) -> Mapping[int, str]:
        """The special tokens of calls, which the text of an answer with tools shows."""
        return {} if tools is None else find_call_format(require_tokenizer(self.tokenizer), self.stop_ids).markers

    def _encode(self, prompt: Any, tools: ToolUse | None = None) -> list[int]:
        if hasattr(prompt, "__len__"):
            if has_text(prompt):
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                schemas = None if tools is None else tools.tools
                return prompt_ids(messages, require_tokenizer(self.tokenizer), tools=schemas)
            if all(isinstance(token, Integral) for token in prompt):
                ids = [int(token) for token in prompt]
                check_tokens([ids], self.model.llm.architecture.vocab_size)
                return ids
        raise InputError(f"a prompt is text, a list of messages or a list of token ids, got {prompt!r}")
