"""`python -m toolroll`: the command."""

from toolroll.rollout.cli import main

if __name__ == "__main__":
    main()
