"""Oracle of the counts: what one layer-step moved, and why.

Knows which rows were resident, selected, made and staged. Knows nothing of how they moved.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from tests.oracles.words import NO_ROW


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """One layer in one step. Lists are per seat; NO_ROW is padding."""

    resident_before: frozenset[int]  # host rows with a slot when the step came to this layer
    selected: Sequence[Sequence[int]]  # host rows each seat selected, its T queries together
    new_rows: Sequence[Sequence[int]]  # host rows each seat makes in this step: values, neither hit nor miss
    staged: Sequence[Sequence[int]]  # host rows copied ahead for each seat


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of unique rows; only `wasted` counts copies.

    hit + useful + recall = unique selected rows that were not made in this step.
    """

    hit: int = 0  # resident before
    useful: int = 0  # not resident, and consumed from staging
    recall: int = 0  # not resident, and fetched because attention needs it
    wasted: int = 0  # copies staged and not consumed, a second copy of the same row included
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0


def count(event: LayerStep, record_bytes: int) -> Counts:
    """The counts of one layer-step. A row that several seats select, or stage, is needed once."""
    made = _rows(event.new_rows)
    needed = _rows(event.selected) - made
    missed = {row for row in needed if row not in event.resident_before}
    consumed = {row for row in missed if row in _rows(event.staged)}
    copies = sum(row != NO_ROW for seat in event.staged for row in seat)
    wasted = copies - len(consumed)
    return Counts(
        hit=len(needed) - len(missed),
        useful=len(consumed),
        recall=len(missed) - len(consumed),
        wasted=wasted,
        host_to_device_bytes=(len(missed) + wasted) * record_bytes,
        device_to_host_bytes=len(made) * record_bytes,
    )


def total(events: Iterable[LayerStep], record_bytes: int) -> Counts:
    """The sums over layer-steps: a row that two layers or two steps need counts in each."""
    sums = dict.fromkeys((field.name for field in dataclasses.fields(Counts)), 0)
    for event in events:
        for name, value in dataclasses.asdict(count(event, record_bytes)).items():
            sums[name] += value
    return Counts(**sums)


def _rows(lists: Sequence[Sequence[int]]) -> set[int]:
    return {int(row) for seat in lists for row in seat if row != NO_ROW}
