"""Texts of finished requests, kept for later engines and shared with replicas."""
