"""The program `baton`, also `python -m baton`."""

from baton.core.interrupts import plain_interrupts


def main() -> None:
    with plain_interrupts("baton"):
        from baton import cli

    cli.main()


if __name__ == "__main__":
    main()
