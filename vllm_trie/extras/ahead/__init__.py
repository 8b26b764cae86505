"""Beams that the device chooses before the host knows of them."""
