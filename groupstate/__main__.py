"""`python -m groupstate`."""

from groupstate.cli import main

if __name__ == "__main__":
    main()
