"""How large a bucket of the weight stream is, where stream.bucket_bytes does not say.

A push in K buckets, of which the busiest rank sends or takes B bytes altogether, takes about

    B / link + K * c + (B / K) * e    seconds,

where c is what a round costs before its first byte: its start, and something for each message that
a rank sends and takes; and e what a byte costs that overlaps with nothing: the first bucket is
packed before anything travels, and the last one is gathered among replicas and written when
nothing travels any more. The least is at K = sqrt(B * e / c).
"""

from __future__ import annotations

import math

from spmdrl.sync.plan import Traffic, count_buckets
from spmdrl.world.machine.hardware import LinkCost

LARGEST = 512 * 2**20
"""Bytes: of each, a rank has two."""


def best_count(nbytes: float, link: LinkCost, *, messages: float, is_gathered: bool) -> int:
    """Return the number of buckets with which a push takes least time.

    Args:
        nbytes: that the busiest rank sends or takes.
        messages: that a rank sends and takes in a bucket.
        is_gathered: whether replicas of an engine gather parts.
    """
    round_s, byte_s = _costs(link, messages=messages, is_gathered=is_gathered)
    least = max(1, math.ceil(nbytes / LARGEST), math.floor(math.sqrt(nbytes * byte_s / round_s)))
    return min(least, least + 1, key=lambda count: count * round_s + nbytes / count * byte_s)


def overhead_s(
    nbytes: float, count: int, link: LinkCost, *, messages: float, is_gathered: bool
) -> float:
    """Return the seconds of a push in `count` buckets besides those in which bytes travel."""
    round_s, byte_s = _costs(link, messages=messages, is_gathered=is_gathered)
    return count * round_s + nbytes / count * byte_s


def _costs(link: LinkCost, *, messages: float, is_gathered: bool) -> tuple[float, float]:
    """Return c and e, see above."""
    alone = 2 / link.copy_bytes_per_s + is_gathered / link.bytes_per_s
    return link.round_s + messages * link.message_s, alone


def choose_buckets(traffic: Traffic, link: LinkCost) -> int:
    """Return in how many buckets a push of this traffic is to travel."""
    whole = max(int(own.max(initial=0)) for own in traffic.bucket_bytes(1))
    is_gathered = any(len(ranks) > 1 for ranks in traffic.receivers)
    wished = best_count(whole, link, messages=traffic.messages, is_gathered=is_gathered)
    return count_buckets(traffic, -(-whole // wished) + 64)
