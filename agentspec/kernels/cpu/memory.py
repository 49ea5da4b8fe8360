"""Addresses as arrays, inside compiled code."""

import numpy as np
from numba import carray
from numpy.typing import NDArray

from agentspec.compiled import compiled, pointer


@compiled
def floats(address: int, count: int) -> NDArray[np.float32]:
    """`count` float32 at an address."""
    return carray(pointer(address, np.float32(0)), count)  # type: ignore[no-any-return]


@compiled
def integers(address: int, count: int) -> NDArray[np.int64]:
    """`count` int64 at an address."""
    return carray(pointer(address, np.int64(0)), count)  # type: ignore[no-any-return]


@compiled
def small_numbers(address: int, count: int) -> NDArray[np.int8]:
    """`count` int8 at an address."""
    return carray(pointer(address, np.int8(0)), count)  # type: ignore[no-any-return]
