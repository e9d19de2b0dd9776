"""What is known about models: the catalogue of short names.

Import as `localspec.models`.
"""

from localspec.models.catalogue import Catalogue, Entry, PackageSource, catalogue

__all__ = ["Catalogue", "Entry", "PackageSource", "catalogue"]
