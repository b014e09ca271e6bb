"""Submitting to clusters."""
