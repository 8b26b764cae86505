"""The only part of the package that touches vLLM's internals; see the ledger in `ledger.py`."""
