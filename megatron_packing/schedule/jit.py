"""How does a planner's inner loop become machine code? By numba, once a machine; the result is kept on disk.

Compiling takes seconds and loading what was compiled about half a second, so call `schedule.warm_up` before the first
step. numba keeps its files in `__pycache__` beside the source, or, where that cannot be written, in the user's cache
directory (`NUMBA_CACHE_DIR` chooses another).

Plans must be the same on every machine. Compiled loops therefore count in int64; where they multiply floats they never
add a product to anything, so that no compiler may fuse the two operations and round differently.
"""

from collections.abc import Callable


def compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled on its first call; other threads of Python run beside it.

    Only in modules that are imported on use: numba takes 0.5 s to import.
    """
    from numba import njit

    machine_code: Callable[P, R] = njit(cache=True, nogil=True)(function)
    return machine_code


def inlined[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """`function`, written out in each compiled loop that calls it: three times as fast where it takes many arrays."""
    from numba import njit

    machine_code: Callable[P, R] = njit(cache=True, inline="always")(function)
    return machine_code
