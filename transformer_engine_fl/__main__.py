"""``python -m transformer_engine_fl``: ``te-fl``, for where no script is on the path."""

from transformer_engine_fl.cli import main

if __name__ == "__main__":  # processes that a command starts import this module too
    main()
