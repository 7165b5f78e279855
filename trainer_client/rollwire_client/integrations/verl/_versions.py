"""The releases of verl that this integration is tested with."""

from __future__ import annotations

from importlib import metadata

from rollwire_client._errors import MissingDependencyError

SUPPORTED = ">=0.9.1,<0.10"


def check_verl() -> None:
    """Raises MissingDependencyError unless a supported release of verl is installed."""
    needed = f"this integration needs verl{SUPPORTED}: pip install 'rollwire[verl]'"
    try:
        from packaging.specifiers import SpecifierSet

        installed = metadata.version("verl")
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise MissingDependencyError(f"verl is not installed, and {needed}") from error
    if not SpecifierSet(SUPPORTED).contains(installed, prereleases=True):
        raise MissingDependencyError(f"verl {installed} is installed, and {needed}")
