"""Text that a grammar forces, as drafts."""
