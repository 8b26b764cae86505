"""Verification of a step's trees."""
