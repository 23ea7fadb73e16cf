"""Content-addressed artefacts: built aside, checked, renamed; manifest last; one lock each.

Resume, sharing between cells and provenance are this one mechanism. Imports no torch.
"""

from opt_deus.store.artefacts import Artefact, Store
from opt_deus.store.fingerprints import fingerprint, fingerprint_files

__all__ = ["Artefact", "Store", "fingerprint", "fingerprint_files"]
