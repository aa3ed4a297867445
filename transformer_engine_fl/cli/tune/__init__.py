"""``te-fl tune``: measuring what kernels can choose, and keeping it in a tuning file."""
