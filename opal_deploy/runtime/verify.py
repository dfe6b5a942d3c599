"""An artifact against its own test vectors, on this machine."""

from __future__ import annotations

from opal_deploy.artifact import test_vectors
from opal_deploy.errors import VerificationError
from opal_deploy.runtime.compare import GATES, Comparison, Gate, compare
from opal_deploy.runtime.session import Session


def verify_vectors(session: Session, origin: str) -> Comparison:
    """Run the test vectors that a model carries and hold the answers against the stored ones.

    Args:
        session: the model, loaded.
        origin: names the file in errors.

    Raises:
        ArtifactError: it carries no vectors. VerificationError: an answer is beyond the gate of its precision.
    """
    metadata = session.metadata
    reference = test_vectors.unpack(metadata.test_vectors, origin)
    recorded = metadata.verification.get("gate")
    gate = (Gate(**recorded) if recorded else GATES[metadata.precision]).elsewhere()
    comparison = compare(reference, session.run(reference.images), metadata, gate)
    if not comparison:
        raise VerificationError(
            f"{origin} does not reproduce its own test vectors in {session.description}: "
            f"{'; '.join(comparison.failures)}; do not use it here"
        )
    return comparison
