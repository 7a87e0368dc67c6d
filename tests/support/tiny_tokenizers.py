"""Tokenizers of the kinds that models have, made in a moment."""

import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PARTS = ("a", "b", " ", "\n", "é", "。", "東", "京", "🎉", "👩\u200d👧", "ab", "e\u0301", ".")


def random_text(rng: random.Random, length: int) -> str:
    """Characters of one to four bytes, some of several code points."""
    return "".join(rng.choice(PARTS) for _ in range(length))


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, some of whose tokens begin or end within a character."""
    tokenizer, rng = Tokenizer(models.BPE()), random.Random(1)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False, max_token_length=5)
    tokenizer.train_from_iterator([random_text(rng, 40) for _ in range(200)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def stripping_tokenizer() -> PreTrainedTokenizerFast:
    """One of SentencePiece's kind whose decoder drops the first space of a text, as Llama 2's does."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return piece_tokenizer(decoders.Sequence(parts))


def piece_tokenizer(decoder: decoders.Decoder | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of SentencePiece's kind: ▁ for a space, words with one before them, and bytes for what it lacks."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("▁", "a"), ("y", "e"), ("ye", "s"), ("▁", "yes"), ("▁", "▁"), ("▁", '"'), ('"', ":"), ("1", "9")]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *map("".join, merges)])}
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    plain = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.decoder = decoder or plain
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
