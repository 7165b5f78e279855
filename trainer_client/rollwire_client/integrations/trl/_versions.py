"""The releases of TRL that this integration is tested with."""

from __future__ import annotations

from importlib import metadata

from rollwire_client._errors import MissingDependencyError

SUPPORTED = ">=1.16,<1.17"


def check_trl() -> None:
    """Raises MissingDependencyError unless a supported release of TRL is installed."""
    needed = f"this integration needs trl{SUPPORTED}: pip install 'rollwire[trl]'"
    try:
        from packaging.specifiers import SpecifierSet

        installed = metadata.version("trl")
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise MissingDependencyError(f"trl is not installed, and {needed}") from error
    if not SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        raise MissingDependencyError(f"trl {installed} is installed, and {needed}")
