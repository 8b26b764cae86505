"""What both missions need of vLLM: the ledger, start-up, front end, messages."""
