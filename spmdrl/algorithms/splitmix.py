"""Numbers that look drawn and follow from a key each: no generator has a state.

Source: Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators (splitmix64).
"""

from __future__ import annotations

from torch import Tensor


def signed(value: int) -> int:
    """Return an integer modulo 2**64, as int64 has it."""
    return (value + 2**63) % 2**64 - 2**63


GAMMA = signed(0x9E3779B97F4A7C15)
"""From one number of a sequence to the next."""
_FIRST = signed(0xBF58476D1CE4E5B9)
_SECOND = signed(0x94D049BB133111EB)


def mixed(values: Tensor) -> Tensor:
    """Return the first number, 64 bits, of the random sequence that each int64 seeds."""
    z = values + GAMMA
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # Of int64 a shift brings in the sign, which the mask takes out again.
        z ^= (z >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        z *= factor
    return z


def uniform(bits: Tensor) -> Tensor:
    """Return a number in [0, 1) of each int64 of such bits: float64, multiples of 2**-53."""
    return (bits >> 11).bitwise_and_(2**53 - 1).double() * 2.0**-53
