"""How our small kernels are launched: programmatically dependent on what precedes them in the stream, or not.

A dependent launch sets its programs up while its predecessor drains; they wait inside, before they touch anything that another kernel
writes or reads. Inside a CUDA graph this hides about a microsecond a launch. Waiting costs nothing in a launch that is not dependent,
and it keeps the compiler from moving loads of weights, which come before, behind the loads of activations.
"""

from kernels.backend import interpreting

DEPENDENT = True
"""Off only to measure what it brings."""


def launch_options() -> dict[str, bool]:
    """Keyword arguments of the launch of a kernel that takes `PDL`: whether it waits and signals."""
    return {"PDL": False} if interpreting() else {"PDL": True, "launch_pdl": DEPENDENT}
