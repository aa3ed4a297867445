"""In-tree vendors, found by their folders."""
