"""Stand-ins for FlagGems' modules, for folders that import them where it is not installed.

They have the names and signatures that FlagGems documents for vendors, and the few helpers
that vendors' operators share. Each module is importable under FlagGems' name while a folder
loads (``shim.py``).
"""
