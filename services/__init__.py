"""Environment that libraries read once, when they are loaded; this file runs before any of them. What the user has set stays.

GRPC_VERBOSITY, GRPC_ENABLE_FORK_SUPPORT   gRPC's core writes lines of its own to stderr (GOAWAY at a peer's orderly end, its handlers at
                                           every fork), which mean nothing to a user; what goes wrong arrives as a status anyway
OMP_WAIT_POLICY                            OpenMP's waiting threads would spin: on shared cores that cost 60 times the work itself
"""

import os

VERSION = "0.1.0"  # pyproject.toml's

for _name, _value in (("GRPC_VERBOSITY", "ERROR"), ("GRPC_ENABLE_FORK_SUPPORT", "0"), ("OMP_WAIT_POLICY", "passive")):
    os.environ.setdefault(_name, _value)
