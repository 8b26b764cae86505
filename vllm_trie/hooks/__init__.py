"""What both missions need of vLLM: the ledger of patches, start-up, front end, messages."""
