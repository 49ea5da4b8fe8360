"""How kernels are compiled: to machine code at their first call, kept on disk where a folder can be written."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import types
from numba.extending import intrinsic

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


@cache
def digest(folder: Path) -> str:
    """Changes with any source in a folder."""
    total = sha256()
    for source in sorted(folder.glob("*.py")):
        total.update(source.read_bytes())
    return total.hexdigest()[:12]


def compiled(function: Kernel) -> Kernel:
    """`function` in machine code, without the interpreter's lock.

    Numba keeps the code beside the source, or in `NUMBA_CACHE_DIR`, or in the user's cache folder. It refuses when
    none of them can be written; then the kernel is compiled once per process. Numba would take kept code for good
    while a kernel in another file that it calls has changed: the name it is kept under stands for the whole folder.
    """
    function.__qualname__ += f"-{digest(Path(function.__code__.co_filename).parent)}"
    try:
        kernel = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        kernel = numba.njit(nogil=True, error_model="numpy")(function)
    widen_constants(kernel)
    return kernel  # type: ignore[no-any-return]


def widen_constants(kernel: Any) -> None:
    """Calls from compiled code with constants use the version for any number: numba would compile the kernel, and all
    that it calls, once more for each constant."""
    find = kernel.get_call_template

    def find_widened(args: Sequence[Any], kws: Mapping[str, Any]) -> Any:
        return find([types.unliteral(kind) for kind in args], {name: types.unliteral(kws[name]) for name in kws})

    kernel.get_call_template = find_widened


def operation(builder: Callable[..., Any]) -> Callable[..., Any]:
    """A function for compiled code that `builder` writes in LLVM's language (numba calls it an intrinsic)."""
    made: Callable[..., Any] = intrinsic(builder)
    return made
