"""`python -m kvsketch` is the command `kvsketch`."""

from kvsketch.cli.app import main

if __name__ == "__main__":
    main()
