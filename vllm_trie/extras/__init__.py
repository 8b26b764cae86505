"""Features beside drafts and searches, a folder each."""
