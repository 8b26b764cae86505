"""Catalogues in the scheduler, and searches inside them."""
