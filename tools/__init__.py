"""Programs that made what the package ships; not part of the package."""
