"""How our small kernels are launched: programmatically dependent on what precedes them in the stream, or not.

A dependent launch sets its programs up while its predecessor drains; they wait inside, before they touch anything that another kernel
writes or reads. Inside a CUDA graph this hides about a microsecond a launch. Waiting costs nothing in a launch that is not dependent,
and it keeps the compiler from moving loads of weights, which come before, behind the loads of activations.
"""

from functools import cache

import torch

from kernels.backend import interpreting

DEPENDENT = True
"""Off only to measure what it brings."""


def in_pairs(*tensors: torch.Tensor | None) -> bool:
    """Whether every row, the last dimension, begins at a whole pair of elements, which bf16 kernels read as one 32-bit word."""
    return all(x is None or (x.data_ptr() % 4 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])) for x in tensors)


@cache
def num_sms(device: torch.device) -> int:
    """Programs that run side by side on `device`: 132 on an H200; the interpreter gets few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def launch_options() -> dict[str, bool]:
    """Keyword arguments of the launch of a kernel that takes `PDL`: whether it waits and signals."""
    return {"PDL": False} if interpreting() else {"PDL": True, "launch_pdl": DEPENDENT}
