"""Python's garbage collector, kept from stopping a process that serves.

Most of what Python frees it frees with the last reference. For cycles there is a collector, and now and then it looks
at every container in the process, in one go and under the interpreter's lock. With torch, transformers and a notebook
loaded these are some hundred thousand and take it 0.1 to 0.2 s, in which no thread launches a step: the worst gap
between two tokens, at a moment that has nothing to do with the requests. (vLLM freezes its heap for the same reason.)
"""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Collect now, and leave all that survives out of later collections, which then look at new objects only.

    For the moment between loading a model and serving it; takes as long as a full collection. What survived and later
    ends in a cycle is found by the next ``thaw_heap``. nanopd's own engines, workers and pools form no cycles once they
    are closed: their memory is free when the last reference goes.
    """
    thaw_heap()
    gc.freeze()


def thaw_heap() -> None:
    """Collect everything, also what ``settle_heap`` had left out: before a new engine asks how much memory is free."""
    gc.unfreeze()
    gc.collect()
