"""`python -m kvsketch` is the command `kvsketch`."""

from kvsketch.cli import main

if __name__ == "__main__":
    main()
