"""Addresses as arrays, inside compiled code."""

from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from agentspec.compiled import compiled, operation


@operation
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """A pointer to values of the type of `like`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), build


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
