"""`python -m localspec`: the command line."""

from localspec.cli import main

if __name__ == "__main__":
    main()
