"""The only part of the package that touches vLLM's internals; see its ledger."""
