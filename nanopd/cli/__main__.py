"""``python -m nanopd.cli``: the same as ``nanopd``, where the script is not on PATH."""

from nanopd.cli import main

if __name__ == "__main__":
    main()
