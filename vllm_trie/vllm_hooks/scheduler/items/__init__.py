"""Catalogues in the scheduler: searches inside them, and ordinary requests that decode an item."""
