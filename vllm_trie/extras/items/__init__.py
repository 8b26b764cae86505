"""Catalogues of items: which token sequences a constrained search may generate."""
