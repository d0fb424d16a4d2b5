"""`python -m services.doctor`: versions, GPUs, network cards, and which implementation of every op runs here, and why.
`python -m services.doctor checkpoint FOLDER`: what a model folder holds and what a rank of it needs, without loading it.
`python -m services.doctor keys FOLDER`: certificates and keys for `[security]`.
"""

import argparse
import sys
from pathlib import Path

from services.doctor.checkpoint import describe, inspect
from services.doctor.keys import make_keys
from services.runtime.errors import BatonError


def _gigabytes(text: str) -> float:
    """Memory of a GPU as given on the command line."""
    value = float(text)
    if not 0 < value <= 1e6:
        raise ValueError(f"{text} is no size of a memory")
    return value


def main(arguments: list[str] | None = None) -> int:
    """Run the subcommand; an error is one sentence and exit status 1."""
    parser = argparse.ArgumentParser(prog="python -m services.doctor")
    commands = parser.add_subparsers(dest="command")
    checkpoint = commands.add_parser("checkpoint", help="a model folder, or its config.json alone: architecture, sizes, fingerprint")
    checkpoint.add_argument("folder", type=Path, help="a Hugging Face folder; its safetensors files may be missing")
    checkpoint.add_argument("--ep", type=int, default=1, help="ranks that share the experts (default 1)")
    checkpoint.add_argument("--tp", type=int, default=1, help="ranks that share the heads (default 1)")
    checkpoint.add_argument("--gpu-memory", type=_gigabytes, metavar="GB", help="memory of a GPU (default: those of H100 and H200)")
    checkpoint.add_argument("--kv-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the latent pages")
    checkpoint.add_argument("--hash", action="store_true", help="read every byte for the revision, however long that takes")
    keys = commands.add_parser("keys", help="certificates for routers and fronts and for clients, their authority, and a ZMQ key")
    keys.add_argument("folder", type=Path, help="where to; files that are there already are kept")
    keys.add_argument("--names", type=lambda text: [name for name in text.split(",") if name], default=[], metavar="NAME,...",
                      help="DNS names and addresses that clients dial routers by")
    options = parser.parse_args(arguments)
    try:
        if options.command is None:
            from services.doctor.overview import show_overview  # torch and Triton: the other commands need neither

            show_overview()
        elif options.command == "keys":
            make_keys(options.folder, options.names)
        else:
            describe(inspect(options.folder, ep=options.ep, tp=options.tp, kv_dtype=options.kv_dtype, read_all=options.hash),
                     options.gpu_memory)
    except BatonError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
