"""How kernels are compiled: to machine code at their first call, kept on disk where a folder can be written."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

log = logging.getLogger(__name__)

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


class KeptCode(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a function. A disk that refuses it, or has spoiled it, costs compiling, never the call."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept code, or None; what cannot be read is forgotten."""
        try:
            kept = super().load_overload(sig, target_context)
        except Exception as error:
            warn_once(f"kept code in {self.cache_path} cannot be read and is compiled again: {error or type(error)}")
            with contextlib.suppress(OSError):
                self.flush()
            kept = None
        if kept is None:
            tell_once()
        return kept

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps code if that is possible."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            warn_once(f"compiled code cannot be kept in {self.cache_path}, each start compiles again: {error}")


@cache
def warn_once(message: str) -> None:
    """Many kernels meet the same disk."""
    log.warning("%s", message)


@cache
def tell_once() -> None:
    """Says what takes so long; many kernels are compiled after each other."""
    log.info("compiling kernels for this processor, which is done once: a minute or so")


@cache
def digest(folder: Path) -> str:
    """Changes with any source in a folder."""
    total = sha256()
    for source in sorted(folder.glob("*.py")):
        total.update(source.read_bytes())
    return total.hexdigest()[:12]


def compiled(function: Kernel) -> Kernel:
    """`function` in machine code, without the interpreter's lock.

    Numba keeps the code beside the source, or in `NUMBA_CACHE_DIR`, or in the user's cache folder. Where none of them
    can be written, the kernel is compiled once per process. Numba would take kept code for good while a kernel in
    another file that it calls has changed: the name it is kept under stands for the whole folder.
    """
    function.__qualname__ += f"-{digest(Path(function.__code__.co_filename).parent)}"
    kernel = numba.njit(nogil=True, error_model="numpy")(function)
    try:
        kernel._cache = KeptCode(function)
    except (OSError, RuntimeError):
        warn_once("no folder can be written to keep compiled code in, each start compiles again; see NUMBA_CACHE_DIR")
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


@operation
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """A pointer to values of the type of `like`."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), build
