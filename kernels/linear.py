"""x @ weight^T with the weight laid out once, at load, as the backend likes it best."""

from typing import Protocol

import torch

from kernels.backend import Backend, select

_ONEDNN_MIN_WORK = 1 << 19
"""rows * in * out from which oneDNN beats torch.mm, on a Zen 5 core with MKL 2024.2 (which takes its AVX2 path there):
256x256 at 8 rows 14 | 15 us (mm | oneDNN), at 16 rows 23 | 18; 2304x256 at 1 row 28 | 39, at 2 rows 55 | 37, at 8 rows
162 | 58, at 512 rows 5,340 | 2,280. A single row is a matrix-vector product, which mm streams at memory speed."""


class Linear(Protocol):
    """A weight ready to be multiplied with.

    x        [num_rows, in]   unit stride in the last dimension, the weight's dtype
    returns  [num_rows, out]  same dtype, new memory; a row depends on that row of x alone (up to rounding, which may
                              depend on num_rows)
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def create_linear(weight: torch.Tensor, *, few_rows: bool = True, backend: Backend = "auto") -> Linear:
    """Lay out `weight` [out, in]; the tensor itself is not kept unless its layout is already the one wanted.

    few_rows  whether calls with one row or two are common: the layouts that suit them and many rows differ, and only
              then are both kept
    """
    assert weight.ndim == 2, f"{weight.shape=}"
    return select(IMPLEMENTATIONS, backend, weight.device.type, weight.dtype)(weight, few_rows)


class ReferenceLinear:
    """The formula."""

    def __init__(self, weight: torch.Tensor, few_rows: bool) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(1) * self._weight).sum(dim=2)


class TorchLinear:
    """torch.mm on [in, out]: for one row twice as fast from memory as [out, in] (2304x256: 92 against 164 us)."""

    def __init__(self, weight: torch.Tensor, few_rows: bool) -> None:
        self._transposed = weight.t().contiguous() if few_rows else weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._transposed)


class OneDnnLinear:
    """oneDNN on its packed layout, torch.mm where that is faster."""

    def __init__(self, weight: torch.Tensor, few_rows: bool) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._small = TorchLinear(weight, few_rows=True) if few_rows else None
        self._work_per_row = weight.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if self._small is not None and (rows < 2 or rows * self._work_per_row < _ONEDNN_MIN_WORK):
            return self._small(x)
        padding = padded_rows(rows) - rows
        if padding == 0:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        x = torch.nn.functional.pad(x, (0, 0, 0, padding))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")[:rows]


def padded_rows(rows: int) -> int:
    """Number of rows that oneDNN is given for `rows`: four different ones an octave, less than a quarter more.

    oneDNN compiles and keeps a kernel (0.3 MB, half a millisecond) for every number of rows of every weight shape, and ragged
    batches bring hundreds: a prefill rank grew by 350 MB, and prompts waited for compilers.
    """
    step = 1 << max((rows - 1).bit_length() - 3, 0)
    return -(-rows // step) * step


IMPLEMENTATIONS = {"onednn": OneDnnLinear, "torch": TorchLinear, "reference": ReferenceLinear}
