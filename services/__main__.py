"""`python -m services`: what can be started, one line each; what the container image does without a command."""

_MODULES = {
    "services.router": "a router: clients and pool fronts connect to it",
    "services.prefill": "a node's prefill front, which starts its ranks",
    "services.decode": "a node's decode front, which starts its ranks",
    "services.runtime.cluster": "a cluster on this machine",
    "services.router.client": "streams an answer from a router",
    "services.doctor": "what a model folder holds, and whether this machine can serve it",
}


def main() -> None:
    """Print the table."""
    print("Baton serves DeepSeek-class models with prefill and decode disaggregated. Start one of these with python -m NAME:\n")
    for name, purpose in _MODULES.items():
        print(f"  {name:26} {purpose}")
    print("\nEach tells its arguments with --help. Settings: one TOML file, --config FILE; every key: services/runtime/config.py")


if __name__ == "__main__":
    main()
