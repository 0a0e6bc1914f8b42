"""`python -m ttapca`: the same as the command `ttapca`."""

from ttapca.cli import main

if __name__ == "__main__":
    main()
