"""`python -m baton.kernels.native`: builds the CPU kernels ahead of their first use. For installers."""

from __future__ import annotations

from . import NativeBuildError, prepare


def main() -> None:
    """Print the library's path, or why there is none. That is no failure, since the references are used then."""
    try:
        print(f"CPU kernels: {prepare()}")
    except NativeBuildError as error:
        print(f"warning: CPU kernels are not available, so plain torch will be used, many times slower: {error}")


if __name__ == "__main__":
    main()
