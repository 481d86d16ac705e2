"""Makes a rank's arithmetic repeatable (`trainer.deterministic`).

Invariant: a step is a function of its batch, its weights and the build of torch, whatever the
number of threads.

On a CPU, the gradient of a weight is a product over the tokens of a micro-batch, whose sum MKL
divides among its threads; forward passes, the norm of the gradient and AdamW do not depend on them.
MKL's strict mode sums in one order. Its switch is read at MKL's first call, which the checks of a
configuration make, so that it is set before them and tested after them; where it has no effect, as
with another library, the rank computes with one thread.
"""

from __future__ import annotations

import functools
import os

import torch

STRICT_SUMS = {"MKL_CBWR": "AUTO,STRICT"}
"""https://www.intel.com/content/www/us/en/docs/onemkl/developer-guide-linux/2024-2/ ("Strict CNR
Mode"). A value that a user has set is kept."""
ONE_ORDER, ONE_THREAD = "in one order", "by one thread"
_TOKENS, _WIDTH = 4096, 128


def sum_in_one_order() -> None:
    """To be called before the process computes anything."""
    for name, value in STRICT_SUMS.items():
        os.environ.setdefault(name, value)


def make_repeatable() -> None:
    """To be called before a rank builds its models."""
    sum_in_one_order()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by the first cuBLAS handle
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if order_of_sums() == ONE_THREAD:
        torch.set_num_threads(1)


@functools.cache
def order_of_sums() -> str:
    """How products on a CPU sum: in one order with any number of threads, or by one thread. Both
    are repeatable, and differ from each other in their last bits."""
    threads = torch.get_num_threads()
    inputs, grads = torch.randn(2, _TOKENS, _WIDTH, generator=torch.Generator().manual_seed(0))
    products = []
    for count in (1, 2):
        torch.set_num_threads(count)
        products.append(grads.T @ inputs)
    torch.set_num_threads(threads)
    return ONE_ORDER if torch.equal(*products) else ONE_THREAD
