"""The only file that knows array libraries: numpy for the sandbox, torch for a trainer, one source for both.

Everything above this file is written once against the array API standard (array-api-compat supplies the
namespace) and so runs on numpy arrays and on torch tensors with gradients. Three things the standard lacks
stand here: logsumexp, log_softmax and detach. Masks go through `where`, never through a product: 0 * inf is nan.
"""

import math
from typing import Any

from array_api_compat import array_namespace, is_numpy_array

Array = Any  # numpy.ndarray or torch.Tensor; the standard has no common static type
NAMESPACES: dict[type, Any] = {}  # by type of array, as found


def namespace(*arrays: Array | float | None) -> Any:
    """The array namespace that the given arrays share; Python numbers and None are ignored."""
    kinds = {type(a): a for a in arrays}
    if len(kinds) == 1:  # array_namespace takes longer than a small torch operation
        (kind,) = kinds
        if kind not in NAMESPACES:
            NAMESPACES[kind] = array_namespace(kinds[kind])
        return NAMESPACES[kind]
    return array_namespace(*[a for a in arrays if not isinstance(a, int | float | None)])


def widen(x: Array) -> Array:
    """`x` in the precision that is computed in: float64 for numpy, at least float32 for torch (bfloat16, float16)."""
    xp = namespace(x)
    if is_numpy_array(x):
        return xp.astype(x, xp.float64, copy=False)
    return xp.astype(x, xp.float32) if xp.finfo(x.dtype).bits < 32 else x


def detach(x: Array) -> Array:
    """`x` without its gradient (torch); numpy arrays pass through."""
    return x.detach() if hasattr(x, "detach") else x


def log(x: float) -> float:
    """log of a Python number >= 0, with log 0 = -inf and log inf = inf: caps and bounds that are off."""
    return math.log(x) if x > 0 else -math.inf


def masked(x: Array, mask: Array, fill: float = 0.0) -> Array:
    """`x` where `mask`, `fill` elsewhere. Applied BEFORE exp: a -inf placeholder would give a nan gradient."""
    if is_numpy_array(x) and mask.all():
        return x  # a pass over a mask is cheaper than one over x
    xp = namespace(x, mask)
    if not xp.isdtype(x.dtype, "real floating"):  # a Python number would make it one
        fill = xp.asarray(fill, dtype=x.dtype, device=x.device)
    return xp.where(mask, x, fill)


def quiet(x: Array, mask: Array) -> Array:
    """`x` for a computation without gradient whose result is masked afterwards: what is masked may be anything in it.

    numpy would warn of nan or an overflow there and gets 0; torch says nothing, and a pass over x is saved.
    """
    return masked(x, mask) if is_numpy_array(x) else x


def count(mask: Array, axis: int | None = None, keepdims: bool = False) -> Array:
    """How many entries of `mask` hold, counted in integers: float32 cannot count beyond 2^24."""
    # torch's sum of booleans makes an int64 copy of them first.
    return namespace(mask).count_nonzero(mask, axis=axis, keepdims=keepdims)


def masked_mean(x: Array, mask: Array, axis: int | None = None, keepdims: bool = False) -> Array:
    """Mean of `x` over the entries where `mask` holds; 0 where none does."""
    xp = namespace(x, mask)
    n = count(mask, axis, keepdims)
    n = xp.astype(xp.where(n > 0, n, xp.ones_like(n)), x.dtype)
    return xp.sum(masked(x, mask), axis=axis, keepdims=keepdims) / n


def logsumexp(x: Array, axis: int = -1, keepdims: bool = False) -> Array:
    """log sum exp(x) along `axis`; -inf where every entry is -inf, or where there is none."""
    xp = namespace(x)
    if x.shape[axis] == 0:
        return xp.sum(x, axis=axis, keepdims=keepdims) - math.inf
    top = xp.max(x, axis=axis, keepdims=True)
    top = detach(masked(top, xp.isfinite(top)))
    total = xp.sum(xp.exp(x - top), axis=axis, keepdims=True)
    live = total > 0
    result = masked(xp.log(masked(total, live, 1.0)) + top, live, -math.inf)
    return result if keepdims else xp.squeeze(result, axis=axis)


def log_softmax(x: Array, axis: int = -1) -> Array:
    """log softmax(x) along `axis`."""
    xp = namespace(x)
    x = x - detach(xp.max(x, axis=axis, keepdims=True))
    return x - xp.log(xp.sum(xp.exp(x), axis=axis, keepdims=True))
