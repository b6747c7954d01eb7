"""Pseudorandom numbers computed from a key each, without the state of a generator.

Source: Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators (splitmix64).
"""

from __future__ import annotations

from torch import Tensor


def to_int64(value: int) -> int:
    """Return an integer modulo 2**64, as a signed int64."""
    return (value + 2**63) % 2**64 - 2**63


GAMMA = to_int64(0x9E3779B97F4A7C15)
"""The difference of two consecutive states of the generator."""
_FIRST = to_int64(0xBF58476D1CE4E5B9)
_SECOND = to_int64(0x94D049BB133111EB)


def mix(values: Tensor) -> Tensor:
    """Return the first 64-bit number of the random sequence with each int64 as its seed."""
    z = values + GAMMA
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # A right shift of int64 fills with the sign bit; the mask makes it a logical shift.
        z ^= (z >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        z *= factor
    return z


def uniform(bits: Tensor) -> Tensor:
    """Return a float64 in [0, 1), a multiple of 2**-53, for each int64 of random bits."""
    return (bits >> 11).bitwise_and_(2**53 - 1).double() * 2.0**-53
