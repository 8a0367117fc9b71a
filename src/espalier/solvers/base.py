"""What a solver is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from espalier.partition import Partition
from espalier.penalties.base import Penalty
from espalier.reading import Reading
from espalier.subproblem import Subproblem


@dataclass(frozen=True)
class Solution:
    """z, and the iterations spent on it (a tensor where counting them on the host would wait for the device)."""

    point: Tensor
    iterations: int | Tensor


class Solver(ABC):
    """Turns a subproblem into its solution, exactly or to a stated accuracy."""

    # the answer for a group does not depend on which other groups are solved along with it
    groupwise: ClassVar[bool] = True
    # it begins best where the last step's solution was
    resumes: ClassVar[bool] = False

    @abstractmethod
    def lacks(self, penalty: Penalty, scalar_metric: bool) -> str | None:
        """What this solver needs and the penalty or the metric does not have; None where it serves."""

    @abstractmethod
    def solve(self, problem: Subproblem, penalty: Penalty, groups: Partition, start: Tensor) -> Solution:
        """argmin Q. Everything comes in the view of `groups`; `start` is where an iteration may begin."""

    def batches(self, penalty: Penalty) -> bool:
        """Whether matrices of several parameters are solved faster by `solving`."""
        return False

    def solving(self, problem: Subproblem, penalty: Penalty, start: Tensor, fused: bool = True) -> Reading[Solution]:
        """`solve` for a stack of matrices of one shape, as a work that others may go on beside; with a kernel of its
        own, where there is one, if `fused`. Needed where it `batches`."""
        raise NotImplementedError(f"{type(self).__name__} says that it batches, and has no `solving`.")


def may_branch(x: Tensor) -> bool:
    """Whether Python may look at a value: on a GPU that would wait for the device."""
    return x.device.type == "cpu"
