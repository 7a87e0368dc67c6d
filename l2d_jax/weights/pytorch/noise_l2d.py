"""Random numbers as a function of seed, sequence and position: the same as l2d_jax draws with JAX for that seed.

The generator is threefry2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Keys
are folded as in `jax.random.fold_in`, and bits become numbers as in `jax.random`. All of it is integer arithmetic on
tensors, with the same result on every device, except the last step in float32, which is the same up to rounding.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA  # constant for the third word of the key
WORD = 0xFFFFFFFF  # mask for 32 bits, which are stored in int64
NOISE, VELOCITY, TIME, CLASS = 0, 1, 3, 4  # streams of a token; l2d_jax samples the token with stream 2


def threefry(key: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Two words of 32 random bits for each two-word counter, with keys [..., 2]; shapes broadcast."""
    first, second = key.unbind(-1)
    words = (first, second, first ^ second ^ PARITY)
    x, y = (high + words[0]) & WORD, (low + words[1]) & WORD
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x = (x + y) & WORD
            y = x ^ (((y << rotation) & WORD) | (y >> (32 - rotation)))
        x = (x + words[(turn + 1) % 3]) & WORD
        y = (y + words[(turn + 2) % 3] + turn + 1) & WORD
    return x, y


def fold(key: Tensor, number: Tensor) -> Tensor:
    """Fold a number into a key, as `jax.random.fold_in`."""
    number = number & WORD
    return torch.stack(threefry(key, torch.zeros_like(number), number), dim=-1)


def seed_key(seed: int | Tensor, device: torch.device) -> Tensor:
    """The key of a seed below 2**63; raises `ValueError`."""
    if not (seed.ndim == 0 if isinstance(seed, Tensor) else hasattr(seed, "__index__") and 0 <= seed < 2**63):
        raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {str(seed)[:40]}")
    number = torch.as_tensor(seed, device=device, dtype=torch.int64)
    return torch.stack([number >> 32, number & WORD], dim=-1)


class Numbered(NamedTuple):
    """Random numbers by position: those of a position depend only on its key."""

    keys: Tensor  # [B, M, 2]

    @classmethod
    def of(cls, seed: int | Tensor, sequences: Any, numbers: Tensor) -> "Numbered":
        """Keys from a seed, sequence numbers of rows, [B] or None for 0, and numbers of tokens, [B, M]."""
        count = len(numbers)
        rows = torch.zeros((), dtype=torch.int64) if sequences is None else torch.as_tensor(sequences)
        if rows.is_floating_point() or rows.numel() not in (1, count):
            raise ValueError(
                f"sequence_ids must be whole numbers, one for each of {count} rows, got {str(sequences)[:40]}"
            )
        rows = rows.to(numbers.device).reshape(-1, 1).expand(count, 1)
        return cls(fold(fold(seed_key(seed, numbers.device), rows), numbers))

    def last(self, count: int) -> "Numbered":
        """Those of the last positions; 0: of all."""
        return Numbered(self.keys[:, -count:])

    def normal(self, width: int) -> Tensor:
        """Standard normal numbers, [B, M, width]."""
        uniform = _uniform(fold(self.keys, torch.tensor(NOISE)), width)
        least = -(1 - 2**-24)  # the float32 after -1
        return 2**0.5 * torch.erfinv((2 * uniform + least).clamp(min=least))

    def gumbel(self, size: int, t: Tensor) -> Tensor:
        """Gumbel noise [B, M, size] for sampling one of `size` tokens at time t, a float32 scalar."""
        key = fold(fold(self.keys, torch.tensor(VELOCITY)), t.reshape(()).view(torch.int32).long())
        return -(-_uniform(key, size).clamp(min=torch.finfo(torch.float32).tiny).log()).log()

    def uniform(self, stream: int) -> Tensor:
        """One number in [0, 1) for each position, [B, M], from the stream TIME or CLASS."""
        return _uniform(fold(self.keys, torch.tensor(stream)), 1)[..., 0]


def _uniform(keys: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) for each key, as `jax.random.uniform`."""
    counters = torch.arange(count, device=keys.device)
    high, low = threefry(keys[..., None, :], torch.zeros_like(counters), counters)
    bits = ((high ^ low) >> 9) | 0x3F800000  # of a float32 in [1, 2)
    return bits.to(torch.int32).view(torch.float32) - 1


class Drawn:
    """Random numbers from PyTorch's generators: one for the batch, one for each row, or None (the default one).

    The numbers of a position depend on everything that was drawn before.
    """

    def __init__(self, generator: Any, like: Tensor) -> None:
        """Numbers for positions of the shape of `like`, [B, M], on its device; raises `ValueError`."""
        self.generator, self.like = generator, like
        if isinstance(generator, list | tuple) and len(generator) != len(like):
            raise ValueError(f"give one generator, or one for each of {len(like)} rows, got {len(generator)}")

    def _draw(self, method: Any, *sizes: int) -> Tensor:
        shape, device = (*self.like.shape, *sizes), self.like.device
        if not isinstance(self.generator, list | tuple):
            return method(torch.empty(shape, device=device), generator=self.generator)
        return torch.cat([method(torch.empty((1, *shape[1:]), device=device), generator=row) for row in self.generator])

    def last(self, count: int) -> "Drawn":
        """Those of the last positions; 0: of all."""
        return Drawn(self.generator, self.like[:, -count:])

    def normal(self, width: int) -> Tensor:
        """Standard normal numbers, [B, M, width]."""
        return self._draw(Tensor.normal_, width)

    def gumbel(self, size: int, t: Tensor) -> Tensor:
        """Gumbel noise [B, M, size] for sampling one of `size` tokens."""
        del t
        return -self._draw(Tensor.exponential_, size).log()

    def uniform(self, stream: int) -> Tensor:
        """One number in [0, 1) for each position, [B, M]."""
        del stream
        return self._draw(Tensor.uniform_)
