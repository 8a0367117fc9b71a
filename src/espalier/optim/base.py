"""The only step(), restart() and structured(): what all five methods share.

A method says how its sums grow with a gradient and which subproblem they pose; everything else happens here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, TypeAlias, cast, overload

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from espalier import kernels, solvers
from espalier.checks import check_number, with_hints
from espalier.groupings import Element, partition_of
from espalier.kernels import Fused
from espalier.optim.arithmetic import average, bits, follow
from espalier.optim.checked import CheckedGroups
from espalier.optim.checkpoint import Group as Group
from espalier.optim.checkpoint import as_text, named
from espalier.optim.diagnostics import Diagnostics
from espalier.optim.emptied import warn_of_emptied
from espalier.optim.gradients import all_finite, check_dense, idle
from espalier.optim.restore import DEVICE_OPTIONS, add_points, clock_device, own_state, restored, take_points
from espalier.optim.together import update_together
from espalier.partition import Partition
from espalier.penalties.base import Penalty, RadialPenalty
from espalier.solvers import Exact, Solver
from espalier.subproblem import Scalar, Subproblem

Tensors: TypeAlias = dict[str, Tensor]
Clock: TypeAlias = dict[str, Scalar]

# Elements that a CPU works on at a time, so that a dozen tensors of this length stay in its caches. Results do not
# depend on it but for rounding.
_BLOCK = 1 << 19


class StructuredOptimizer(Optimizer, ABC):
    """A torch optimizer whose every step solves argmin_x <d, x> + ½ <x − a, H (x − a)> + τ ψ(x) and moves toward it."""

    # sums reach back to an anchor W⁰: there is something to restart, and the structured point differs from the weights
    anchored: ClassVar[bool] = False
    # H is a multiple of the identity
    scalar_metric: ClassVar[bool] = False
    # numbers kept for each parameter
    clock: ClassVar[tuple[str, ...]] = ("step",)
    # its name in kernels/; a subclass that poses another problem has none of its own, and so none
    kernel: ClassVar[str]
    # what solver="auto" takes under a diagonal metric, where the penalty allows it
    preferred_solver: ClassVar[Solver] = Exact()

    # parameters that hold z, their weights, and the bits of z if eval() put it there
    _away: list[tuple[Tensor, Tensor, Tensor | None]] | None = None
    _evaluating: bool = False  # since eval()
    _last: dict[Tensor, Tensor] | None = None  # z before a restart
    # the state is as it was made: no step has counted yet
    _fresh: bool = False
    # torch's __getstate__ keeps nothing but state and groups; these start anew in a copy
    _diagnostics: Diagnostics | None = None
    _fused: Fused | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in vars(cls):
            cls.__init__ = with_hints(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        solver: str | Solver,
        maximize: bool,
        skip_nonfinite: bool,
        fused: bool | None,
        capturable: bool,
        options: dict[str, Any],
    ) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameter groups, not a model: pass espalier.regularize(model, penalty), "
                "or model.parameters() for no penalty."
            )
        defaults = {
            "lr": lr,
            **options,
            "penalty": None,
            "grouping": None,
            "solver": solver,
            "maximize": maximize,
            "skip_nonfinite": skip_nonfinite,
            "fused": fused,
            "capturable": capturable,
            "method": type(self).__name__,
            "evaluating": False,  # in a checkpoint: whether it was made after eval()
        }
        self._groups = CheckedGroups(self, {})
        super().__init__(params, defaults)

    @abstractmethod
    def _buffers(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors shaped like the parameter, zero at the start ("anchor" is the weights)."""

    @abstractmethod
    def _tick(self, clock: Clock, group: Group) -> Clock:
        """The clock one step later, with whatever else this step's equations need."""

    @abstractmethod
    def _accumulate(self, x: Tensors, clock: Clock, group: Group) -> None:
        """Let x["grad"] into the sums, in place."""

    @abstractmethod
    def _pose(self, x: Tensors, clock: Clock, group: Group) -> Subproblem:
        """The subproblem that the sums pose."""

    def _averaging(self, clock: Clock, group: Group) -> Scalar:
        """c of w ← (1 − c) w + c z."""
        return 1.0

    def _begin_step(self) -> None:
        """What changes in the groups with every call of step()."""

    # ------------------------------------------------------------------------------------------------ groups

    def add_param_group(self, param_group: Group) -> None:
        """As in torch; besides, `penalty`, `grouping` and `solver` are checked against each other and each shape."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["method"] = type(self).__name__  # and not that of another optimizer, whose group this may have been
        try:
            self._groups.add(group, len(self.param_groups) - 1)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if group["capturable"]:
            self._options_to_device(group)

    def _check_numbers(self, group: Group) -> None:
        """Raise if an option is no number that it can be. What lies on a GPU is not read."""
        check_number("lr", group["lr"], low=0)

    def _options_to_device(self, group: Group) -> None:
        """A captured graph reads these from the device, where they can change between its replays."""
        home = group["params"][0].device
        for k in DEVICE_OPTIONS & group.keys():
            if not isinstance(group[k], Tensor) or group[k].device != home:
                group[k] = torch.tensor(float(group[k]), dtype=torch.float64, device=home)

    def _resumes(self, group: Group) -> bool:
        """Whether the solver's iterations begin at the last z, not at the weights that lag behind it."""
        return self.anchored and group["penalty"] is not None and self._solver(group).resumes

    def _solver(self, group: Group) -> Solver:
        return solvers.pick(group["solver"], group["penalty"], self.scalar_metric, self.preferred_solver)

    def _partition(self, group: Group, p: Tensor) -> Partition:
        if not group["penalty"]:
            return partition_of(Element(), p.shape)
        self._groups.check_parameter(group, p)
        return partition_of(group["grouping"], p.shape)

    # ------------------------------------------------------------------------------------------------ step

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    # torch.compile loses what a traced step writes into the clock, so a step is never traced. Not
    # torch.compiler.disable: that imports the compiler, which takes as long as torch itself
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step, for every parameter that has a gradient."""
        self._refuse_in_structured("step")
        self._check_capture()
        self._groups.check_changes()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_dense(self.param_groups)
        if self._only_makes_state():
            return loss
        self._begin_step()
        finite = all_finite(self._parameters()) if self.defaults["skip_nonfinite"] else True
        if finite is False:
            return loss
        with self._fused.side_by_side() if self._fused else nullcontext():
            for j, group in enumerate(self.param_groups):
                self._step_group(group, j, finite)
        if self._last and finite is True and not self.defaults["capturable"]:
            self._last = {p: z for p, z in self._last.items() if p.grad is None}
        return loss

    def _only_makes_state(self) -> bool:
        """Whether this step is torch.distributed.checkpoint's first one, at lr = 0 and with gradients of zeros, whose
        only purpose is that there be a state to load into. It does not count, and the next begins anew."""
        if self._fresh:
            self.state.clear()
        self._fresh = not self.state and idle(self.param_groups)
        if self._fresh:
            for group in self.param_groups:
                self._with_state(group)
        return self._fresh

    def _with_state(self, group: Group) -> list[Tensor]:
        """The parameters that a step changes, each with its state."""
        ready = [p for p in group["params"] if p.grad is not None and p.numel()]
        for p in ready:
            if not self.state[p]:
                self._new_state(group, p)
        return ready

    def _step_group(self, group: Group, number: int, finite: Tensor | bool) -> None:
        left = self._with_state(group)
        if fused := self._kernels(group):
            left = fused.step(group, left, finite if isinstance(finite, Tensor) else None)
        penalty = group["penalty"]
        if penalty and self._solver(group).batches(penalty) and self._diagnostics is None:
            update_together(self, group, left, finite)
        else:
            names = dict(named(group, number)) if left else {}
            for p in left:
                self._update(group, p, names[p], finite)

    def _kernels(self, group: Group) -> Fused | None:
        """The kernels, where they may take parameters of this group."""
        if group["fused"] is False or self._diagnostics is not None:
            return None
        if self._fused is None:
            self._fused = Fused(self)
        return self._fused

    def _update(self, group: Group, p: Tensor, name: str, finite: Tensor | bool) -> None:
        clock = self._tick(self._read_clock(self.state[p]), group)
        c = self._averaging(clock, group)
        for x, groups in self._pieces(group, p, self.state[p], p.grad):
            before = self._let_in(x, clock, group, finite)
            z = self._solve(self._pose(x, clock, group), group, groups, x, name)
            average(x["weight"], z, c)
            self._take_back(x, before, finite)
        self._set_clock(p, clock, finite)

    def _let_in(self, x: Tensors, clock: Clock, group: Group, finite: Tensor | bool) -> Tensors:
        """Accumulate the gradient. Returns copies of what a step that does not count must take back."""
        before = {}
        if isinstance(finite, Tensor):
            before = {k: v.clone() for k, v in x.items() if k != "grad"}
            x["grad"] = torch.where(finite.to(x["grad"].device), x["grad"], 0.0)
        if group["maximize"]:
            x["grad"] = -x["grad"]
        self._accumulate(x, clock, group)
        return before

    def _take_back(self, x: Tensors, before: Tensors, finite: Tensor | bool) -> None:
        for k, v in before.items():
            x[k].copy_(torch.where(cast(Tensor, finite).to(v.device), x[k], v))

    def _set_clock(self, p: Tensor, clock: Clock, finite: Tensor | bool) -> None:
        state = self.state[p]
        for k in self.clock:
            new = torch.as_tensor(clock[k], dtype=torch.float64)
            if isinstance(finite, Tensor):
                new = torch.where(finite.to(state[k].device), new, state[k])
            state[k].copy_(new)
        if "master" in state:
            p.copy_(state["master"])

    def _solve(self, problem: Subproblem, group: Group, groups: Partition, x: Tensors, name: str) -> Tensor:
        penalty: Penalty | None = group["penalty"]
        # τ = 0, as at lr = 0, takes the penalty away; a − d/H is then a to the bit
        if penalty is None or (not isinstance(problem.tau, Tensor) and problem.tau == 0):
            return problem.unpenalised()
        problem, start = problem.split(groups), groups.split(x.get("point", x["weight"]))
        solution = self._solver(group).solve(problem, penalty, groups, start)
        if self._diagnostics is not None and self._away is None:
            self._diagnostics.record(name, problem, penalty, groups, start, solution)
        z = groups.merge(solution.point, x["weight"].shape)
        if "point" in x and self._away is None:
            x["point"].copy_(z)
        return z

    def _pieces(
        self, group: Group, p: Tensor, state: dict[str, Tensor], grad: Tensor | None
    ) -> Iterator[tuple[Tensors, Partition]]:
        """The parameter and its state, whole or cut between groups, with the gradient in the state's type."""
        x = {k: state[k] for k in self._buffers(group)}
        x["weight"] = state.get("master", p)
        if grad is not None:
            x["grad"] = grad
            if x["weight"] is not p:
                follow(x["weight"], p)
        groups = self._partition(group, p)
        penalty = group["penalty"]
        if self._resumes(group):
            if "point" not in state:
                state["point"] = x["weight"].clone()
            x["point"] = state["point"]
        groupwise = penalty is None or (isinstance(penalty, RadialPenalty) and self._solver(group).groupwise)
        whole = p.device.type != "cpu" or p.numel() <= _BLOCK or self._diagnostics is not None
        if whole or not groupwise:
            pieces: Iterable[tuple[Tensors, Partition]] = [(x, groups)]
        else:
            x = {k: v.view(groups.shape) for k, v in x.items()}
            pieces = (
                ({k: v.narrow(b.axis, b.start, b.length) for k, v in x.items()}, b.groups)
                for b in groups.blocks(_BLOCK)
            )
        for piece, part in pieces:
            if "grad" in piece:
                piece["grad"] = piece["grad"].to(piece["weight"].dtype)
            yield piece, part

    # ------------------------------------------------------------------------------------------------ structure

    @contextmanager
    def structured(self) -> Iterator[StructuredOptimizer]:
        """Within the context the parameters hold z, exactly structured; afterwards the weights, to the bit.

        z is recomputed from the optimizer's state, so nothing is kept for it during training. Only from a restart to
        the next step the z of the stage before is kept. ProxSGD, ProxGen and ProxSSI put z into the weights anyway, so
        with them nothing happens. An iterative solver may end elsewhere, within its tolerance, than it did in the step;
        matrices that step in a batch may round otherwise alone.
        """
        own = self._own
        if own._away is not None:
            yield own
            return
        own._put_structured()
        try:
            if not kernels.capturing():
                warn_of_emptied(own, stacklevel=3)  # above: contextlib, and whoever enters
            yield own
        finally:
            own._put_weights()

    def eval(self) -> None:
        """Put z into the parameters, as in `structured()`, until `train()` is called.

        transformers' Trainer calls both by itself, and Accelerate's wrapper hands both on. Between the two a checkpoint
        holds the weights beside z.
        """
        own = self._own
        if own.anchored and own._away is None:
            away = own._put_structured()
            own._away = [(p, w, bits(p)) for p, w, _ in away]
            own._evaluating = True
            warn_of_emptied(own, stacklevel=2)

    def train(self) -> None:
        """Put the weights back into the parameters, if `eval()` took them away.

        A parameter that was written to since then, for instance by loading a model, keeps what was written.
        """
        own = self._own
        if own._evaluating:
            own._put_weights()

    @_disable_dynamo
    def _put_structured(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        away: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._away = away
        try:
            with torch.no_grad():
                for j, group in enumerate(self.param_groups if self.anchored and not self._fresh else ()):
                    names = {p: name for p, name in named(group, j) if self.state.get(p)}
                    away += [(p, p.clone(), None) for p in names]
                    left = list(names)
                    if fused := self._kernels(group):
                        left = fused.deliver(group, left)
                    for p in left:
                        p.copy_(self._structured_point(group, p, self.state[p], names[p]))
                for p, z in (self._last or {}).items():
                    # by the clock: the replay of a captured step runs nothing here. Without waiting for a device
                    p.copy_(torch.where(self.state[p]["step"].to(p.device) == 0, z, p))
        except BaseException:
            self._put_weights()
            raise
        return away

    @_disable_dynamo
    def _put_weights(self) -> None:
        away, self._away, self._evaluating = self._away, None, False
        with torch.no_grad():
            for p, w, z in away or ():
                # not by p._version: parameters that are views of one tensor share it. A cast is no writing
                if z is None or p.dtype != w.dtype or bits(p).to(z.device) == z:
                    p.copy_(w)

    def _last_points(self) -> dict[Tensor, Tensor]:
        """z before the last restart, of the parameters that have made no step since then."""
        self._last = {p: z for p, z in self._last.items() if self.state[p]["step"] == 0} if self._last else {}
        return self._last

    @property
    def _own(self) -> StructuredOptimizer:
        """The optimizer itself. Lightning's wrapper claims its class, so methods of this class are called on it."""
        own: StructuredOptimizer = self.__dict__.get("_optimizer", self)
        return own

    @_disable_dynamo
    def _structured_point(self, group: Group, p: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
        clock = self._read_clock(state)
        groups = self._partition(group, p)
        z = [
            self._solve(self._pose(x, clock, group), group, part, x, name)
            for x, part in self._pieces(group, p, state, None)
        ]
        if len(z) == 1:
            return z[0]
        return torch.cat(z, dim=groups.blocks(_BLOCK)[0].axis).reshape(p.shape)

    @_disable_dynamo
    @torch.no_grad()
    def restart(self) -> None:
        """Begin a new stage: W⁰ ← W and t, α, V, U ← 0. Methods without an anchor have nothing to restart.

        Until the next step `structured()` gives the z of the stage that ended.
        """
        if self._own is not self:
            return self._own.restart()
        self._refuse_in_structured("restart")
        if not self.anchored:
            return
        self._last = {p: p.clone() for p, *_ in self._put_structured()}
        self._put_weights()
        for group, p, _ in self._parameters():
            if state := self.state.get(p):
                for k in (*self.clock, *self._buffers(group)):
                    state[k].zero_()
                weight = state.get("master", p)
                if weight is not p:
                    follow(weight, p)
                state["anchor"].copy_(weight)
                if "point" in state:
                    state["point"].copy_(weight)
                if "radius" in state:
                    first = kernels.first_radius(self._partition(group, p), weight)
                    if state["radius"].shape == first.shape:
                        state["radius"].copy_(first)
                    else:
                        del state["radius"]

    @contextmanager
    def diagnostics(self) -> Iterator[Diagnostics]:
        """Within the context every subproblem solved is reported: iterations, subgradient residual, decrease of the
        objective, active groups. Outside it nothing is computed for that."""
        own = self._own
        own._diagnostics = Diagnostics()
        try:
            yield own._diagnostics
        finally:
            own._diagnostics = None

    # ------------------------------------------------------------------------------------------------ state

    def _new_state(self, group: Group, p: Tensor) -> None:
        fresh = {k: torch.zeros((), device=clock_device(self, p)) for k in self.clock}
        fresh |= {k: p if k == "anchor" else torch.zeros_like(p) for k in self._buffers(group)}
        if self._resumes(group):
            fresh["point"] = p
        self.state[p] = own_state(self, group, p, fresh)

    def _read_clock(self, state: dict[str, Tensor]) -> Clock:
        return {k: state[k].item() if state[k].device.type == "cpu" else state[k] for k in self.clock}

    def __getstate__(self) -> dict[str, Any]:
        # after eval() a copy can bring the weights back; nobody leaves structured() for a copy
        keys = ("_last", "_fresh", "_evaluating", "_away") if self._evaluating else ("_last", "_fresh")
        return {**super().__getstate__(), **{k: getattr(self, k) for k in keys}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        known = self._groups.shapes if "_groups" in vars(self) else {}
        self._groups = CheckedGroups(self, {p: known.get(p, p.shape) for _, p, _ in self._parameters()})

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only; penalty, grouping and solver stand as text."""
        if self._own is not self:
            return self._own.state_dict()
        # hooks come last, and see what is returned
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            saved = super().state_dict()
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        add_points(self, saved)
        for group in saved["param_groups"]:
            group.update(as_text(group), evaluating=self._evaluating)
        for hook in hooks.values():
            changed = hook(self, saved)
            saved = saved if changed is None else changed
        return saved

    @_disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave. A checkpoint that does not fit raises before anything changes."""
        # not torch's own: that would cast float32 state to the type of half precision parameters
        if self._own is not self:
            return self._own.load_state_dict(state_dict)
        if not self._evaluating:
            self._refuse_in_structured("load_state_dict")
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups, state, points = restored(self, state_dict)
        self._fresh = False
        self.__setstate__({"state": state, "param_groups": groups})
        take_points(self, points)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ------------------------------------------------------------------------------------------------ checks

    def _parameters(self) -> Iterator[tuple[Group, Tensor, str]]:
        for j, group in enumerate(self.param_groups):
            for p, name in named(group, j):
                yield group, p, name

    def _refuse_in_structured(self, what: str) -> None:
        if self._away is not None:
            where, way_out = (
                ("after eval()", "Call train()") if self._evaluating else ("inside structured()", "Leave the context")
            )
            raise RuntimeError(f"{what}() {where}: the weights are away and would be lost. {way_out} first.")

    def _check_capture(self) -> None:
        if not self.defaults["capturable"] and kernels.capturing():
            raise RuntimeError(
                f"step() is being captured in a CUDA graph, and {type(self).__name__} was built with capturable=False. "
                "Build it with capturable=True."
            )
