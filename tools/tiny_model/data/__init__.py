"""The training data: task documents made by program from the Python standard library."""
