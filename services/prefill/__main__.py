"""`python -m services.prefill --config FILE`: one node's prefill front; it starts its engines."""
from services.prefill.server import main

if __name__ == "__main__":
    main()
