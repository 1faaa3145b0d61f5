"""`python -m piecework`: the same as the command `piecework`."""

from __future__ import annotations

from .runtime.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
