"""Whether a release of a framework is installed that an integration is tested with."""

from __future__ import annotations

from importlib import metadata

from rollwire_client._errors import MissingDependencyError


def check_installed(package: str, supported: str) -> None:
    """Raises MissingDependencyError unless such a release is installed.

    Args:
        package: Of PyPI; the extra has the same name.
        supported: The releases, as in a requirement: ">=1.16,<1.17".
    """
    needed = f"this integration needs {package}{supported}: pip install 'rollwire[{package}]'"
    try:
        from packaging.specifiers import SpecifierSet

        installed = metadata.version(package)
    except (ImportError, metadata.PackageNotFoundError) as error:
        raise MissingDependencyError(f"{package} is not installed, and {needed}") from error
    if not SpecifierSet(supported).contains(installed, prereleases=True):
        raise MissingDependencyError(f"{package} {installed} is installed, and {needed}")
