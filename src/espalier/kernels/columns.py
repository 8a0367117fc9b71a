"""Where things stand in the tables that the kernels read; `launch.py` writes them."""

from __future__ import annotations

import triton.language as tl

# columns of the table of tensors: addresses, then lengths
GRAD = tl.constexpr(0)
WEIGHT = tl.constexpr(1)
PARAM = tl.constexpr(2)
ANCHOR = tl.constexpr(3)
SUM = tl.constexpr(4)
SQUARES = tl.constexpr(5)
LARGEST = tl.constexpr(6)
RADIUS = tl.constexpr(7)
ROWS = tl.constexpr(8)
GROUPS = tl.constexpr(9)
RUN = tl.constexpr(10)
SCALE = tl.constexpr(11)
TREND = tl.constexpr(12)
TABLE = tl.constexpr(13)

# columns of the table of clocks
STEP = tl.constexpr(0)
ALPHA = tl.constexpr(1)
FACTOR = tl.constexpr(2)
CLOCKS = tl.constexpr(4)

# the options of a parameter group
FIRST_MOMENT = tl.constexpr(0)  # momentum, or β₁
SECOND_MOMENT = tl.constexpr(1)
LOG2_FIRST = tl.constexpr(2)
LOG2_SECOND = tl.constexpr(3)
WEIGHT_DECAY = tl.constexpr(4)
LAM_GROUP = tl.constexpr(5)
LAM_ENTRY = tl.constexpr(6)
GAMMA = tl.constexpr(7)
LR = tl.constexpr(8)
EPS = tl.constexpr(9)
RAMP = tl.constexpr(10)
FLOOR = tl.constexpr(11)
OPTIONS = tl.constexpr(12)

# columns of the scalars
GAIN = tl.constexpr(0)
SQUARE_GAIN = tl.constexpr(1)
SQUARE_KEEP = tl.constexpr(2)
PULL = tl.constexpr(3)
DECAY = tl.constexpr(4)
METRIC_SCALE = tl.constexpr(5)
METRIC = tl.constexpr(6)
KAPPA = tl.constexpr(7)
ENTRY_KAPPA = tl.constexpr(8)
FLAT = tl.constexpr(9)
AVERAGING = tl.constexpr(10)
SCALARS = tl.constexpr(16)

# columns of the work list
TENSOR = tl.constexpr(0)
FIRST = tl.constexpr(1)
SHARE = tl.constexpr(2)
SHARES = tl.constexpr(3)
PANEL = tl.constexpr(4)
CLOCK = tl.constexpr(5)
WORK = tl.constexpr(8)
