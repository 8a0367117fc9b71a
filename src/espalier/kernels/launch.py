"""From parameters to launches: a table of addresses, lists of work, one launch for each class of tiles."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from espalier.kernels import capturing, columns, device, first_radius, methods
from espalier.kernels.branches import Branches
from espalier.kernels.geometry import RESIDENT, Geometry, geometry, tile_of
from espalier.kernels.options import Options, pinned, upload
from espalier.kernels.work import BLOCK, BLOCK_WARPS, Bucket, Slab, programs
from espalier.penalties import L1, GroupMCP, SparseGroupLasso
from espalier.penalties.base import group_weight

if TYPE_CHECKING:
    from espalier.optim.base import StructuredOptimizer

Group: TypeAlias = dict[str, Any]

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# which of a parameter's tensors stands in which column of the table
_COLUMNS = {
    "weight": columns.WEIGHT,
    "param": columns.PARAM,
    "anchor": columns.ANCHOR,
    "grad_sum": columns.SUM,
    "grad_average": columns.SUM,
    "square_sum": columns.SQUARES,
    "square_average": columns.SQUARES,
    "square_max": columns.LARGEST,
    "radius": columns.RADIUS,
    "scale": columns.SCALE,
    "trend": columns.TREND,
}
# those that have an entry a group
_BY_GROUP = ("radius", "scale", "trend")
# addresses of gradients whose tables are kept: the allocator hands out the same few sets of them again and again, and
# a new table takes 0.1 ms of the host's time
_TABLES = 16


@dataclass(frozen=True)
class Launch:
    """The programs of one bucket, and the memory through which they share groups."""

    bucket: Bucket
    programs: int
    sharers: int  # programs that wait for each other, at most
    work: Tensor
    counters: Tensor
    early: Tensor
    later: Tensor


class Plan:
    """The launches of a step over some parameters of one group, all on one device."""

    def __init__(self, optimizer: StructuredOptimizer, group: Group, params: Sequence[Tensor]) -> None:
        self._optimizer, self._group, self._params = optimizer, group, list(params)
        self._device = params[0].device
        self._entrywise = group["penalty"] is None or isinstance(group["penalty"], L1)
        self._addresses = [p.data_ptr() for p in params]
        self._strides = [p.stride() for p in params]
        self._types = [p.dtype for p in params]
        for p in params:
            self._settle(p)
        self._state = self._state_now()  # the table holds their addresses
        buckets: dict[Bucket, list[Slab]] = {}
        for i in range(len(params)):
            for bucket, slab in self._slabs(i):
                buckets.setdefault(bucket, []).append(slab)
        self._slabs_in_order = [slab for slabs in buckets.values() for slab in slabs]
        self._aligned = False
        self._rows = torch.tensor([slab.row for slab in self._slabs_in_order])
        # by where the gradients lie, and the one that CUDA graphs write into and read
        self._tables: dict[tuple[int, ...], tuple[Tensor, bool]] = {}
        self._shared_table = torch.zeros_like(self._rows, device=self._device)
        self._table: Tensor | None = None
        self._spare: Tensor | None = pinned(self._rows, self._device)
        self._recorded: list[Tensor] = []
        self._clocks = upload(torch.tensor([self._clock(i) for i in range(len(params))]), self._device)
        self._scalars = torch.zeros(len(params), columns.SCALARS.value, device=self._device)
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
        self._options = Options(group, self._device)
        self._counters, self._launches = self._schedule(buckets)
        self._counted = len(self._counters)
        self._branches = Branches()
        # programs that wait for each other and hold their places meanwhile: of several launches at a time each could
        # hold those that another lacks, for ever, unless there is room for the largest panels of all
        self.waiting = sum(launch.sharers for launch in self._launches)

    @property
    def recorded(self) -> bool:
        """Whether a CUDA graph reads its tables."""
        return bool(self._recorded)

    def current(self) -> bool:
        """Whether parameters and state still lie where they did."""
        now = self._state_now()
        return (
            self._addresses == [p.data_ptr() for p in self._params]
            and self._strides == [p.stride() for p in self._params]
            and len(now) == len(self._state)
            and all(map(is_, now, self._state))
        )

    def _state_now(self) -> list[Tensor]:
        state = self._optimizer.state
        return list(chain.from_iterable(state[p].values() for p in self._params))

    # ------------------------------------------------------------------------------------------------ tables

    def _settle(self, p: Tensor) -> None:
        """Bring the state to where the kernels expect it: clocks on the device, the rest in the parameter's order."""
        state = self._optimizer.state[p]
        for k in self._optimizer.clock:
            if state[k].device != p.device:
                state[k] = upload(state[k], p.device)
        for k in (*self._optimizer._buffers(self._group), *(["master"] if "master" in state else [])):
            if not same_order(state[k], p):
                state[k] = torch.empty_like(p, dtype=state[k].dtype).copy_(state[k])
        if not self._entrywise:
            groups = self._optimizer._partition(self._group, p)
            radius = state.get("radius")
            if radius is None or radius.shape != (len(_BY_GROUP), groups.count):
                state["radius"] = first_radius(groups, state.get("master", p))

    def _slabs(self, i: int) -> Iterator[tuple[Bucket, Slab]]:
        p, optimizer = self._params[i], self._optimizer
        groups = optimizer._partition(self._group, p)
        state = optimizer.state[p]
        tensors = {"weight": state.get("master", p), "param": p}
        tensors |= {k: state[k] for k in optimizer._buffers(self._group)}
        if not self._entrywise:
            tensors |= zip(_BY_GROUP, state["radius"], strict=True)
        at = Geometry(1, 1, 1, p.numel()) if self._entrywise else geometry(groups, tuple(p.shape), p.stride())
        assert at is not None
        for part in range(at.batch):
            start = part * (p.numel() // at.batch)
            row = [0] * columns.TABLE.value
            for name, x in tensors.items():
                first = part * at.groups if name in _BY_GROUP else start
                row[_COLUMNS[name].value] = x.data_ptr() + first * x.element_size()
            row[columns.ROWS.value], row[columns.GROUPS.value], row[columns.RUN.value] = at.rows, at.groups, at.run
            tile = None if self._entrywise else tile_of(at, processors(p.device))
            length = at.run if tile is None or tile.axis else at.groups * at.run
            aligned = length % 4 == 0 and all(a % 16 == 0 for a in row[: columns.RADIUS.value])
            bucket = Bucket(p.dtype, aligned, p.numel() >= 2**31, tile)
            yield bucket, Slab(i, start * p.element_size(), tuple(row), at)

    def _clock(self, i: int) -> list[int]:
        p, penalty = self._params[i], self._group["penalty"]
        state = self._optimizer.state[p]
        factor = group_weight(getattr(penalty, "weight", None), self._optimizer._partition(self._group, p))
        row = [0] * columns.CLOCKS.value
        row[columns.STEP.value] = state["step"].data_ptr()
        row[columns.ALPHA.value] = state["alpha"].data_ptr() if "alpha" in state else 0
        row[columns.FACTOR.value] = struct.unpack("q", struct.pack("d", factor))[0]
        return row

    def _schedule(self, buckets: dict[Bucket, list[Slab]]) -> tuple[Tensor, list[Launch]]:
        """The launches, and the memory of theirs that begins each step at zero."""
        row = 0
        works: list[tuple[Bucket, Tensor, int]] = []
        for bucket, slabs in buckets.items():
            panels, parts = 0, list[Tensor]()
            for slab in slabs:
                part, more = programs(bucket.tile, slab, row, panels)
                parts.append(part)
                panels += more
                row += 1
            works.append((bucket, torch.cat(parts), panels))
        sums = 1 if self._optimizer.scalar_metric else 6
        rooms = [n * (2, sums * bucket.tile.width)[i] if bucket.tile else 0 for bucket, _, n in works for i in (0, 1)]
        zeroed = torch.zeros(sum(rooms), dtype=torch.int32, device=self._device)
        views = torch.split(zeroed, rooms)
        return zeroed, [
            Launch(
                bucket,
                len(work),
                max(bucket.tile.sharers(s.geometry) for s in buckets[bucket]) if bucket.tile else 0,
                upload(work, self._device),
                counters=views[2 * i],
                early=views[2 * i + 1],
                later=torch.zeros(
                    panels * 2 * bucket.tile.width if bucket.tile else 0, dtype=torch.int64, device=self._device
                ),
            )
            for i, (bucket, work, panels) in enumerate(works)
        ]

    def _point_at(self, grads: Sequence[Tensor], captured: bool) -> None:
        """Let the table hold the gradients' addresses."""
        addresses = tuple([g.data_ptr() for g in grads])
        # once there is a graph, its replays change its table, too
        graphs = captured or self.recorded
        if not graphs and (known := self._tables.get(addresses)):
            self._table, self._aligned = known
            return
        starts = [addresses[s.parameter] + s.start for s in self._slabs_in_order]
        self._aligned = not any(start % 16 for start in starts)
        rows = self._rows
        if captured:
            # a recorded copy reads the host's memory at every replay: it gets its own, made ready before
            if self._spare is None:
                raise RuntimeError("take a step between two captures: each needs memory that a capture cannot make.")
            rows, self._spare = self._spare, None
            self._recorded.append(rows)
        rows[:, columns.GRAD.value] = torch.frombuffer(array("q", starts), dtype=torch.int64)
        if not captured:
            rows = pinned(rows, self._device)
            if self._spare is None:
                self._spare = pinned(self._rows, self._device)
        if graphs:
            self._table = self._shared_table.copy_(rows, non_blocking=True)
            return
        if len(self._tables) == _TABLES:
            self._tables.clear()
        # a copy even where the rows are there already: they change with the next gradients
        self._table = torch.empty_like(self._shared_table).copy_(rows, non_blocking=True)
        self._tables[addresses] = self._table, self._aligned

    # ------------------------------------------------------------------------------------------------ launches

    def step(self, finite: Tensor | None) -> None:
        """One step."""
        grads = [g for p in self._params if (g := p.grad) is not None]
        if [g.stride() for g in grads] != self._strides or [g.dtype for g in grads] != self._types:
            grads = [_in_order(g, p) for g, p in zip(grads, self._params, strict=True)]
        captured = capturing()
        self._point_at(grads, captured)
        self._run(finite, update=True, captured=captured)

    def deliver(self) -> None:
        """The structured point into the parameters."""
        if self._table is None:  # no step yet: any address does for what is not read
            self._point_at(self._params, captured=False)
        # where Newton begins is for the steps alone to say
        radii = [state["radius"] for p in self._params if "radius" in (state := self._optimizer.state[p])]
        saved = [r.clone() for r in radii]
        self._run(None, update=False)
        for r, before in zip(radii, saved, strict=True):
            r.copy_(before)

    def _run(self, finite: Tensor | None, update: bool, captured: bool = False) -> None:
        skip = finite is not None
        given, alignments = self._options.current()
        finite = self._counters if finite is None else finite.to(self._device, torch.int32)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            tensors = len(self._params)
            self._launch(
                methods.tick,
                tensors,
                [
                    self._clocks,
                    self._scalars,
                    self._counters,
                    finite,
                    *given,
                    self._options.values,
                    tensors,
                    self._counted,
                ],
                (update, skip, False, alignments),
                None,
            )
            beside = captured and self.waiting <= RESIDENT * (processors(self._device) or 0)
            with self._branches.fork() if beside else nullcontext():
                for launch in self._launches:
                    with self._branches.branch():
                        self._step_bucket(launch, finite, update, skip)

    def _step_bucket(self, launch: Launch, finite: Tensor, update: bool, skip: bool) -> None:
        arguments: list[Any] = [launch.work, self._table, self._scalars, finite]
        if launch.bucket.tile:
            arguments += [launch.counters, launch.early, launch.later]
            arguments.append(getattr(self._optimizer._solver(self._group), "max_iters", 100))
        kernel = device.step_groups if launch.bucket.tile else device.step_entries
        self._launch(kernel, launch.programs, arguments, (update, skip, self._aligned), launch.bucket)

    def _launch(
        self, kernel: Any, programs: int, arguments: Sequence[Any], kind: tuple[Any, ...], bucket: Bucket | None
    ) -> None:
        """Launch a kernel. Triton's dispatch takes 0.1 ms; what it compiled is called without it from then on."""
        if known := self._compiled.get((bucket, *kind)):
            launch, constants = known
            launch(*arguments, *constants)
            return
        named, options = self._constants(bucket, *kind[:3])
        compiled = kernel[(programs,)](*arguments, **named, **options)
        if isinstance(compiled, CompiledKernel):  # not in the interpreter
            constants = [named[name] for name in kernel.arg_names[len(arguments) :]]
            self._compiled[bucket, *kind] = compiled[programs, 1, 1], constants

    def _constants(self, bucket: Bucket | None, update: bool, skip: bool, aligned: bool) -> tuple[Group, Group]:
        """What a kernel is compiled for: its constants, and the compiler's options; without a bucket the clocks'."""
        optimizer, group, penalty = self._optimizer, self._group, self._group["penalty"]
        constants = {"METHOD": optimizer.kernel, "UPDATE": update, "SKIP": skip}
        if bucket is None:
            return constants | {"BLOCK": 1024}, {}
        constants |= {
            "MAXIMIZE": group["maximize"],
            "AMSGRAD": group.get("amsgrad", False),
            "AVERAGED": optimizer.anchored,
            "TYPE": TYPES[bucket.dtype],
            "ALIGNED": bucket.aligned and aligned,
            "MASTER": bucket.dtype != torch.float32,
        }
        if bucket.tile is None:
            return constants | {"BLOCK": BLOCK}, {"num_warps": BLOCK_WARPS}
        tile = bucket.tile
        constants |= {
            "SCALAR": optimizer.scalar_metric,
            "CONCAVE": isinstance(penalty, GroupMCP),
            "ENTRIES": isinstance(penalty, SparseGroupLasso),
            "AXIS": tile.axis,
            "RUN_LENGTH": tile.run,
            "HEIGHT": tile.height,
            "COLUMNS": tile.columns,
            "SHARED": tile.shared,
            "SINGLE": tile.single,
            "FEW": tile.few,
            "WIDE": bucket.wide,
        }
        return constants, {"num_warps": tile.warps, "maxnreg": tile.registers}


def same_order(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape lie in memory alike."""
    return x.stride() == y.stride() or all(
        n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), y.stride(), strict=True)
    )


def _in_order(grad: Tensor, p: Tensor) -> Tensor:
    return grad if grad.dtype == p.dtype and same_order(grad, p) else torch.empty_like(p).copy_(grad)


def processors(where: torch.device) -> int | None:
    """How many programs run at a time at least; None in the interpreter."""
    return torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else None
