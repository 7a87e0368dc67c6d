"""The ranges of numeric options, as types with which config sections and command lines declare their numbers.

Upper ends are beyond all use, and below what overflows an int32 or a float32. Lower ends of floats that divide are
above what is 0 in float32: `1e-46` is positive in Python, and a division by zero on a device.
"""

from typing import Annotated, Literal

from annotated_types import Interval

Count = Annotated[int, Interval(ge=1, le=10**9)]
CountOrZero = Annotated[int, Interval(ge=0, le=10**9)]
# JAX takes 32 bits of a seed and drops the others without a word; runs and chats count on from that of an option.
Seed = Annotated[int, Interval(ge=0, lt=2**31)]
KeySeed = Annotated[int, Interval(ge=0, lt=2**32)]
Rows = Annotated[int, Interval(ge=1, le=10**6)]  # of a batch
Tokens = Annotated[int, Interval(ge=1, le=10**7)]
Length = Annotated[int, Interval(ge=2, le=10**7)]  # tokens of a text that has a next token
Width = Annotated[int, Interval(ge=1, le=2**16)]
Label = Annotated[int, Interval(ge=0, lt=4096)]  # number of a class
Classes = Annotated[int, Interval(ge=0, le=4096)]
Passes = Annotated[float, Interval(ge=1, le=10_000)]  # over the weights, of a token
Steps = Annotated[int, Interval(ge=0, le=9_999)]  # one less than evaluations
Bins = Annotated[int, Interval(ge=1, le=10_000)]
Budget = Annotated[int, Interval(ge=1, le=10_000)]  # evaluations of the path per token
Draws = Annotated[int, Interval(ge=1, le=4096)]  # noise samples
SeveralDraws = Annotated[int, Interval(ge=2, le=4096)]  # noise samples that have a standard error
Beams = Annotated[int, Interval(ge=1, le=2**16)]
Port = Annotated[int, Interval(ge=0, le=65535)]
Slices = Annotated[int, Interval(ge=1, le=1024)]  # of TPUs, joined by the slower network
MeshSize = Annotated[int, Interval(ge=-1, le=10**6)]  # devices of one axis; -1: the rest

Scale = Annotated[float, Interval(ge=1e-6, le=1e6)]
Epochs = Annotated[float, Interval(ge=1e-9, le=1e6)]
PeakRate = Annotated[float, Interval(ge=1e-12, le=10)]
FinalRate = Annotated[float, Interval(ge=0, le=10)]
Average = Annotated[float, Interval(ge=0, le=0.999999)]  # decay of a moment: Adam divides by its complement
Epsilon = Annotated[float, Interval(ge=1e-30, le=1)]
WeightDecay = Annotated[float, Interval(ge=0, le=100)]
Norm = Annotated[float, Interval(ge=1e-12, le=1e30)]
Dropout = Annotated[float, Interval(ge=0, lt=1)]
Tolerance = Annotated[float, Interval(ge=1e-12, le=1e6)]
Temperature = Annotated[float, Interval(ge=0, le=1000)]
Strength = Annotated[float, Interval(ge=-1000, le=1000)]  # of guidance
Share = Annotated[float, Interval(ge=0, le=1)]
TopP = Annotated[float, Interval(ge=1e-6, le=1)]
End = Annotated[float, Interval(ge=1e-6, le=1)]  # t at which the ODE stops
Seconds = Annotated[float, Interval(ge=0.1, le=10**6)]
Minutes = Annotated[float, Interval(ge=0, le=10_000)]
Nats = Annotated[float, Interval(ge=0, le=1000)]
Penalty = Annotated[float, Interval(ge=-2, le=2)]  # of tokens that an answer has, in logits; OpenAI's range
Bias = Annotated[float, Interval(ge=-100, le=100)]  # of a token's logit; OpenAI's range
Power = Annotated[float, Interval(ge=0, le=1000)]

FixedSolver = Literal["euler", "midpoint", "heun", "heun3", "rk4", "restart"]
AdaptiveSolver = Literal["fehlberg2", "adaptive_heun", "bosh3"]
MOST_PARALLEL = 127  # evaluations of a token that can go side by side
