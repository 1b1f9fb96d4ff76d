"""What the garbage collector may take of a process that serves."""

import gc

YOUNG_OBJECTS_MAX = 20_000
"""Made and not freed since the garbage collector looked last; Python's own bound is 700."""


def spare_garbage_collector() -> None:
    """Let the garbage collector look at what requests leave, and seldom; once all has started.

    What starting has made, most of it the code of libraries, lives as long as the process: looking
    it through takes a router 65 to 300 ms and a worker 150, in which all streams stand still. A
    request's own objects go when nobody refers to them; looked through while they are in use they
    cost a tenth of its time.
    """
    gc.collect()  # what is garbage by now would never be freed
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])
