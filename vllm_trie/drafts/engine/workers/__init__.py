"""Workers whose model runners draft and verify."""
