"""The implementation sets of this package, found by their folders."""
