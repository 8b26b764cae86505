"""Data files: framed with a checksum, sealed in memory, watched for changes."""
