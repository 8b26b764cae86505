"""Drafts in the front end: options of requests, streams, the log."""
