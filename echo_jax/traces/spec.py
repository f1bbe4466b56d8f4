"""How a synthetic trace is named: `synth:median`, `synth:mix,layers=16,requests=8,steps=1000,jump_every=50`.

Knows kinds of layers by name, how a model mixes them, and the parameters of a name. `synth` knows what they mean for
scores.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable

import numpy as np

from echo_jax.models.config import FULL, SHARED
from echo_jax.traces import SYNTHETIC

CONTEXT = 32
"""Context of a synthetic trace in units of K, unless one is given."""


@dataclasses.dataclass(frozen=True)
class Archetype:
    """A kind of layer: how the variance of a token's score is shared, and how long new tokens are favoured."""

    fixed: float  # a^2, the share of what never changes
    slow: float  # b^2, the share that fades; the rest of 1 is fresh in every step
    rho: float  # what is left of the slow part after a step
    recency: float  # r0, added to the newest token, in standard deviations
    reach: float  # tau, tokens after which that is down to 1/e, in units of K

    def __post_init__(self):
        if not (self.fixed >= 0 and self.slow >= 0 and self.fixed + self.slow <= 1 + 1e-9):
            raise ValueError(
                f"fixed {self.fixed} and slow {self.slow} are shares of a variance of 1; neither may be negative and "
                "their sum must not exceed 1"
            )
        if not 0 <= self.rho <= 1:
            raise ValueError(f"rho is {self.rho} but must lie in [0, 1]")
        if not self.reach > 0:
            raise ValueError(f"reach is {self.reach} but must be above 0; recency=0 switches recency off")
        if not math.isfinite(self.recency):
            raise ValueError(f"recency is {self.recency} but must be a finite number")


HOT, MEDIAN, CHURNY, VOLATILE, SCAN = "hot", "median", "churny", "volatile", "scan"
ARCHETYPES = {
    HOT: Archetype(0.90, 0.07, 0.90, 4.0, 1.25),
    MEDIAN: Archetype(0.79, 0.11, 0.74, 4.0, 0.91),
    CHURNY: Archetype(0.45, 0.25, 0.80, 3.5, 0.47),
    VOLATILE: Archetype(0.49, 0.26, 0.999, 0.46, 0.92),
    SCAN: Archetype(0.0, 0.0, 0.0, 0.0, 1.0),
}
"""`scan` is an adversary: every score is fresh in every step, so nothing that was kept is of use."""

MIX, FIG17, GLM = "mix", "echo-fig17", "glm"
MIXES = {MIX: 16, FIG17: 61, GLM: 78}
"""Models by name, and their layers. `mix`: shares of hot, median and churny layers. `echo-fig17`: the mix that gives
ECHO's hit rates at 10 K slots a request, 97-99 % in most layers, about 95 % in layer 12 and 88 % in layer 17. `glm`:
`mix` with GLM-5.2's layers that share a set."""

FIG17_LAYERS = {12: VOLATILE, 17: CHURNY}


@dataclasses.dataclass(frozen=True)
class SynthSpec:
    """Everything a synthetic trace is made from. Equal specs give equal scores."""

    name: str
    layers: int = 0  # 0: one, or as many as the model of that name has
    requests: int = 1
    steps: int = 0  # 0: 192, or the 256 of ECHO's requests
    top_k: int = 2048
    context: int = 0  # positions that the longest query sees; 0: 32 top_k
    seed: int = 0
    hot: float = 0.15  # shares of a mix's layers
    median: float = 0.65
    churny: float = 0.20
    volatile: float = 0.0
    group: int = 0  # layers that share a set from layer 2 on, as in GLM-5.2; 0: 4 for `glm`, else 1
    jump_every: int = 0  # steps between topic jumps of a request; 0: none
    jump: float = 1.0  # share of the lasting parts' variance that a jump replaces
    request_steps: int = 0  # steps after which a row's request ends and another begins; 0: never
    scanners: int = 0  # rows, from the last one down, that scan in every layer
    fixed: float | None = None  # these five replace the archetypes' own
    slow: float | None = None
    rho: float | None = None
    recency: float | None = None
    reach: float | None = None

    def __post_init__(self):
        if self.name not in (*ARCHETYPES, *MIXES):
            raise ValueError(f"synthetic trace {self.name!r} is unknown; {_nearest(self.name, [*ARCHETYPES, *MIXES])}")
        for field, usual in self._usual().items():
            object.__setattr__(self, field, getattr(self, field) or usual)
        for field in ("layers", "requests", "steps", "top_k", "context", "group"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)} but must be at least 1")
        for field in ("jump_every", "request_steps", "scanners", "seed"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)} but must not be negative")
        if (run := self.request_steps or self.steps) > self.context:
            raise ValueError(
                f"a request of {run} steps does not fit a context of {self.context}; raise context, or "
                "lower steps or request_steps"
            )
        if self.scanners > self.requests:
            raise ValueError(f"{self.scanners} scanners but {self.requests} requests; lower scanners")
        if not 0 <= self.jump <= 1:
            raise ValueError(f"jump is {self.jump} but must lie in [0, 1], the share that is replaced")
        if min(self.shares.values()) < 0 or sum(self.shares.values()) <= 0:
            raise ValueError(f"shares of layers are {self.shares} but none may be negative and one must be above 0")
        self.archetype(0)  # refuses wrong parameters now

    def _usual(self) -> dict[str, int]:
        """What 0 stands for."""
        return {
            "layers": MIXES.get(self.name, 1),
            "steps": 256 if self.name == FIG17 else 192,
            "context": CONTEXT * self.top_k,
            "group": 4 if self.name == GLM else 1,
        }

    @property
    def shares(self) -> dict[str, float]:
        return {HOT: self.hot, MEDIAN: self.median, CHURNY: self.churny, VOLATILE: self.volatile}

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Which layers score; with group 4 every fourth one from layer 2 on does, and three share its set."""
        return tuple(
            FULL if layer < 3 or layer % self.group == 2 % self.group else SHARED for layer in range(self.layers)
        )

    def archetype_names(self) -> tuple[str, ...]:
        """Of each layer. A mix gives each kind its share, to the nearest whole layer, in an order drawn from the seed;
        a shared layer is of the kind of the layer whose set it has."""
        if self.name in ARCHETYPES:
            return (self.name,) * self.layers
        if self.name == FIG17:
            usual = [HOT if layer % 3 == 0 else MEDIAN for layer in range(self.layers)]
            return tuple(FIG17_LAYERS.get(layer, kind) for layer, kind in enumerate(usual))
        kinds = self.layer_kinds
        drawn = np.random.default_rng([self.seed, 1]).permutation(_by_share(self.shares, kinds.count(FULL)))
        own = iter(drawn.tolist())
        names: list[str] = []
        for kind in kinds:
            names.append(next(own) if kind == FULL else names[-1])
        return tuple(names)

    def archetype(self, layer: int) -> Archetype:
        """The layer's, with what the spec replaces in it."""
        given = {name: getattr(self, name) for name in (field.name for field in dataclasses.fields(Archetype))}
        chosen = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(ARCHETYPES[self.archetype_names()[layer]], **chosen)

    def text(self) -> str:
        """The name that gives this spec again."""
        usual = {field.name: field.default for field in dataclasses.fields(self)} | self._usual()
        changed = {name: value for name, value in dataclasses.asdict(self).items() if value != usual[name]}
        del changed["name"]
        return ",".join([SYNTHETIC + self.name, *(f"{name}={value!r}" for name, value in changed.items())])


def _by_share(shares: dict[str, float], layers: int) -> list[str]:
    """So many layers of each kind that the counts add up: whole parts first, then the largest rests, of equal rests the
    larger share."""
    total = sum(shares.values())
    exact = {name: share / total * layers for name, share in shares.items()}
    counts = {name: math.floor(count + 1e-9) for name, count in exact.items()}
    order = sorted(exact, key=lambda name: (-round(exact[name] - counts[name], 9), -shares[name]))
    for name in order[: layers - sum(counts.values())]:
        counts[name] += 1
    return [name for name, count in counts.items() for _ in range(count)]


def parse(text: str) -> SynthSpec:
    """The spec of `synth:NAME[,KEY=VALUE...]`. ValueError for an unknown name or key, with the nearest."""
    name, *rest = text.removeprefix(SYNTHETIC).split(",")
    types = {field.name: str(field.type) for field in dataclasses.fields(SynthSpec) if field.name != "name"}
    given: dict[str, int | float] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in types:
            raise ValueError(f"synthetic trace {text!r} has no parameter {key!r}; {_nearest(key, types)}")
        convert = int if types[key] == "int" else float
        try:
            given[key] = convert(value)
        except ValueError:
            what = "a whole number" if convert is int else "a number"
            raise ValueError(
                f"synthetic trace {text!r}: {key} is {value!r} but must be {what}; write {key}=1"
            ) from None
        if not equals or not math.isfinite(given[key]):
            raise ValueError(f"synthetic trace {text!r}: {key} is {value!r} but must be finite; write {key}=1")
    return SynthSpec(name.strip(), **given)  # type: ignore[arg-type]


def _nearest(word: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(known)}"
