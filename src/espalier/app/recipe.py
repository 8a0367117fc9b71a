"""A recipe: one task with the settings of every method, checked before anything runs."""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from espalier.app.errors import Problem, shown
from espalier.app.models import MODELS
from espalier.optim.dual_averaging import ramp_length

STRUCTURED = ("ramda", "rmda", "proxsgd", "proxgen", "proxssi")
DUAL_AVERAGING = ("ramda", "rmda")
WITHOUT_DECAY = (*DUAL_AVERAGING, "proxsgd")
WITH_MOMENTUM = (*DUAL_AVERAGING, "proxsgd", "sgd")  # the others have Adam's betas

Count = Annotated[int, Field(gt=0, le=10**12)]  # no larger than a float can count
Share = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
# mean, and standard deviation where there is one
Spread = Annotated[tuple[float, ...], Field(min_length=1, max_length=2)]


class Strict(BaseModel):
    """Knows its keys, and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Named(BaseModel):
    """A name, and the options of what it names beside it."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Model(Named):
    """A network of `espalier.app.models`; options that its data knows (classes, vocabulary) may be left out."""

    @model_validator(mode="after")
    def _known(self) -> Model:
        builder = MODELS.get(self.name)
        if builder is None:
            raise ValueError(f"no model {self.name!r}{nearest(self.name, MODELS)}")
        known = inspect.signature(builder).parameters
        unknown(self.options, known, f"option of the model {self.name}")
        hints = get_type_hints(getattr(builder, "__init__", builder) if isinstance(builder, type) else builder)
        for option, value in self.options.items():
            # sizes; a memory of 0 is one
            positive = hints[option] is int and option != "memory"
            kind = PositiveInt if positive else NonNegativeInt if hints[option] is int else hints[option]
            try:  # numbers and lists, however they are spelt
                self.__pydantic_extra__[option] = TypeAdapter(kind).validate_python(value)  # type: ignore[index]
            except ValidationError as error:
                said = error.errors()[0]["msg"]
                raise ValueError(f"{option}={shown(value)}: {said[:1].lower()}{said[1:]}") from None
        return self


class DataSet(Named):
    """A data set of `espalier.app.data`, and the share of its training examples to hold out for tuning."""

    holdout: Share = 0.0

    @model_validator(mode="after")
    def _plain(self) -> DataSet:
        for option, value in self.options.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):  # a date, or bytes
                raise ValueError(f"{option}={shown(value)}: expected a number or a word") from None
        return self


class Solver(Strict):
    """How the subproblem is solved; `auto` is exact wherever that is possible."""

    name: Literal["auto", "exact", "pg", "newton", "dr"] = "auto"
    max_iters: Count | None = None
    rtol: Weight | None = None  # 0: no such rule

    @model_validator(mode="after")
    def _takes_limits(self) -> Solver:
        if self.max_iters is not None and self.name not in ("pg", "dr"):
            raise ValueError("max_iters is an option of the solvers pg and dr")
        if self.rtol is not None and self.name != "pg":
            raise ValueError("rtol is an option of the solver pg")
        return self


class Method(Strict):
    """One optimizer with its settings."""

    optimizer: Literal["ramda", "rmda", "proxsgd", "proxgen", "proxssi", "sgd", "adam", "adamw"]
    lr: PositiveFloat
    lam: Weight = 0.0
    momentum: Share | None = None
    eps: PositiveFloat | None = None
    weight_decay: Weight = 0.0
    schedule: Literal["stages", "cosine", "linear", "constant"] = "stages"
    warmup: Share = 0.0  # the share of the run in which lr grows from 0; not before stages
    solver: Solver = Solver()
    # which look at the run its table shows: the last, or the most structured one, as the paper does on MNIST
    pick: Literal["last", "most-structured"] = "last"

    @model_validator(mode="after")
    def _fits(self) -> Method:
        name = self.optimizer
        if self.lam and name not in STRUCTURED:
            raise ValueError(f"{name} has no penalty, so lam must be 0")
        if self.momentum is not None and name not in WITH_MOMENTUM:
            raise ValueError(f"{name} has no momentum (it has Adam's betas, 0.9 and 0.999)")
        if self.eps is not None and name in ("rmda", "proxsgd", "sgd"):
            raise ValueError(f"{name} has no eps")
        if self.weight_decay and name in WITHOUT_DECAY:
            raise ValueError(f"{name} has no weight decay")
        if self.solver != Solver() and name not in STRUCTURED:
            raise ValueError(f"{name} has no subproblem to solve, and no solver")
        if self.warmup and self.schedule == "stages":
            raise ValueError("warmup is for the schedules cosine, linear and constant, and this one is stages")
        return self


class Paper(Strict):
    """What the paper reports for one method."""

    quality: Spread
    structure: Spread | None = None


class Recipe(Strict):
    """One task: model, data, schedule, and the settings of every method."""

    title: str
    task: Literal["classification", "language", "speech", "masked-images"]
    model: Model
    data: DataSet
    batch: Count
    eval_batch: Count | None = None
    length: Count
    unit: Literal["epochs", "steps"] = "epochs"  # of length, milestones and evaluate_every
    milestones: list[Count] = []
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    scale: Annotated[float, Field(gt=0, le=100)] = 1.0  # shortens length and milestones together
    penalty: Literal["group-lasso", "nuclear-norm", "l1"] = "group-lasso"
    unpenalised: list[str] = []  # names of modules, with * and ?
    methods: dict[str, Method] = Field(min_length=1)
    paper: dict[str, Paper] = {}
    label_smoothing: Share = 0.0
    mask_ratio: Share = 0.6
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    accumulate: Count = 1  # batches of batch / accumulate before each step
    clip: PositiveFloat | None = None  # of the gradient's norm
    evaluate_every: Count = 1
    skip_nonfinite: bool = False  # skip batches with NaN or Inf, which otherwise end the run
    recalibrate: Count = 20  # batches that batch norm's statistics of the structured point are taken from
    save_minutes: Weight = 2.0  # between two checkpoints
    cuda_graph: bool = True  # replay steps on a GPU, where they are all alike
    compile: bool = False  # train through torch.compile, which rounds differently

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if raw.get("mixed_precision") is False:  # which YAML makes of `no`
            raw = {**raw, "mixed_precision": "no"}
        methods = raw.get("methods")
        if not isinstance(methods, dict):
            return raw
        named = {k: {"optimizer": k, **v} if isinstance(v, dict) and k in STRUCTURED else v for k, v in methods.items()}
        return {**raw, "methods": named}

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if sorted(set(self.milestones)) != self.milestones or self.milestones[-1:] >= [self.length]:
            wrong = f"milestones must increase and end before the length {self.length}: {self.milestones}"
            raise ValueError(f"{wrong} (scale shortens both)")
        if self.batch % self.accumulate:
            raise ValueError(f"batch {self.batch} can't be cut into accumulate = {self.accumulate} equal parts")
        unknown(self.paper, self.methods, "method (in paper)")
        return self

    def only(self, method: str) -> Recipe:
        """The recipe with one method, which is what a run is made from."""
        if method not in self.methods:
            raise Problem(f"the recipe has no method {method!r}{nearest(method, self.methods)}")
        paper = {k: v for k, v in self.paper.items() if k == method}
        return self.model_copy(update={"methods": {method: self.methods[method]}, "paper": paper})

    def plan(self, steps_per_epoch: float) -> Plan:
        """The schedule in optimizer steps, scaled."""
        unit = 1.0 if self.unit == "steps" else steps_per_epoch
        total, *milestones = (max(1, round(n * self.scale * unit)) for n in (self.length, *self.milestones))
        if sorted(set(milestones)) != milestones or milestones[-1:] >= [total]:
            raise Problem(f"scale {self.scale:g} leaves no step between two of the milestones: make it larger")
        return Plan(total, tuple(milestones), min(total, max(1, round(self.evaluate_every * unit))))


@dataclass(frozen=True)
class Plan:
    """When what happens, in optimizer steps."""

    total: int
    milestones: tuple[int, ...]
    period: int

    def momentum(self, wanted: float) -> float:
        """A momentum with which c reaches 1 before the last quarter of the last stage: the wanted one, where that does.

        c grows as c√i, which takes (1/c)² steps; a shortened schedule may have fewer.
        """
        last = self.total - (self.milestones[-1] if self.milestones else 0)
        room = max(1, 3 * last // 4)
        return wanted if ramp_length(1 - wanted) <= room else math.floor((1 - 1 / math.sqrt(room)) * 1e4) / 1e4


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error line: the nearest known name, or all of them."""
    listed = list(names)
    close = difflib.get_close_matches(name, listed, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (there are: {', '.join(listed)})"


def unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise on the first name that is not known."""
    listed = list(known)
    for name in given:
        if name not in listed:
            raise ValueError(f"no {what} is called {name!r}{nearest(name, listed)}")
