"""Run the `toolroll` command line for `python -m toolroll`."""

from toolroll.cli import main

if __name__ == "__main__":
    main()
