"""What running sequences hold in the cache, by format: for each flow, and in all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from msgspec import Struct

from surefoot.backends.types import FormatStats, FormatTotal

from .cache_rule import format_name
from .sequence import Sequence


class _Held(Struct, frozen=True):
    """What one sequence has in one format. A block holds `capacity` tokens."""

    flow: str
    format: str
    num_tokens: int
    blocks: list[int]
    capacity: int


def formats_of(running: Iterable[Sequence]) -> tuple[FormatStats, ...]:
    """Tokens and blocks of each flow, by format. Shared blocks count once for each holder."""
    of_flow: dict[tuple[str, str], list[_Held]] = defaultdict(list)
    for held in _held(running):
        of_flow[held.flow, held.format].append(held)
    return tuple(
        FormatStats(
            flow=flow,
            format=name,
            num_tokens=sum(held.num_tokens for held in all_held),
            num_blocks=sum(len(held.blocks) for held in all_held),
        )
        for (flow, name), all_held in of_flow.items()
    )


def totals_of(running: Iterable[Sequence]) -> tuple[FormatTotal, ...]:
    """Tokens and blocks in all, by format, and how much of the blocks is empty. Shared blocks count once."""
    of_format: dict[str, list[_Held]] = defaultdict(list)
    for held in _held(running):
        of_format[held.format].append(held)
    return tuple(_total(name, all_held) for name, all_held in of_format.items())


def _total(name: str, all_held: list[_Held]) -> FormatTotal:
    num_blocks = len({block for held in all_held for block in held.blocks})
    num_slots = num_blocks * all_held[0].capacity
    # Only full blocks are ever shared, so what is empty is empty once.
    num_empty = sum(len(held.blocks) * held.capacity - held.num_tokens for held in all_held)
    return FormatTotal(
        format=name,
        num_tokens=num_slots - num_empty,
        num_blocks=num_blocks,
        fragmentation=num_empty / num_slots if num_slots else 0.0,
    )


def _held(running: Iterable[Sequence]) -> Iterator[_Held]:
    for sequence in running:
        flow = sequence.request.message.flow
        for cache_format, part in sequence.held.items():
            yield _Held(flow, format_name(cache_format), part.num_tokens, part.table, part.capacity)
