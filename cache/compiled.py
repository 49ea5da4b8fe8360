"""How kernels are compiled: to machine code at their first call, kept on disk where a folder can be written."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def compiled(function: Kernel) -> Kernel:
    """`function` in machine code, without the interpreter's lock.

    Numba keeps the code beside the source, or in `NUMBA_CACHE_DIR`, or in the user's cache folder. It refuses when
    none of them can be written; then the kernel is compiled once per process.
    """
    try:
        kernel = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        kernel = numba.njit(nogil=True)(function)
    return kernel  # type: ignore[no-any-return]
