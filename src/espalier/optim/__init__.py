"""The optimizers: each says which subproblem its sums pose, and `base` does the rest."""

from espalier.optim.prox_gen import ProxGen as ProxGen
from espalier.optim.prox_sgd import ProxSGD as ProxSGD
from espalier.optim.prox_ssi import ProxSSI as ProxSSI
from espalier.optim.ramda import RAMDA as RAMDA
from espalier.optim.rmda import RMDA as RMDA
from espalier.optim.schedule import StagewiseRestart as StagewiseRestart
from espalier.optim.warmup_cosine import WarmupCosine as WarmupCosine
from espalier.optim.wrappers import structured as structured
from espalier.optim.wrappers import unwrap as unwrap
