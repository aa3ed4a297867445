"""The dispatch heart: torch-free, one noun per module."""
