"""The types that travel between autosel's modules.

They are frozen; the ones without tensors print a ``repr`` that evaluates back and have one short
``key``. Nothing here does torch work: tensors are only carried. Sizes are logical (inputs,
outputs, experts), never packed words.
"""

from autosel.core.certificate import (
    PROPERTIES,
    Certificate,
    CertifiedCase,
    Level,
    Limits,
    WeightsAudit,
    check_properties,
)
from autosel.core.device import Device
from autosel.core.outcome import (
    AccuracyClass,
    Candidate,
    Decision,
    ErrorFigures,
    Measurement,
    Params,
    Rejected,
    Scalar,
    Status,
    TokenBucket,
)
from autosel.core.plan import (
    BreakEven,
    NextCopy,
    Plan,
    PlannedBucket,
    ResidentLayout,
    SingleLayout,
)
from autosel.core.problem import (
    ACT_DTYPES,
    ACTIVATIONS,
    SCALE_DTYPES,
    Activation,
    Problem,
    QuantScheme,
)
from autosel.core.support import Reason, Support
from autosel.core.weights import CanonicalExperts, QuantWeight, Routing
from autosel.core.workload import TokenBin, Workload

__all__ = [
    "ACTIVATIONS",
    "ACT_DTYPES",
    "PROPERTIES",
    "SCALE_DTYPES",
    "AccuracyClass",
    "Activation",
    "BreakEven",
    "Candidate",
    "CanonicalExperts",
    "Certificate",
    "CertifiedCase",
    "Decision",
    "Device",
    "ErrorFigures",
    "Level",
    "Limits",
    "Measurement",
    "NextCopy",
    "Params",
    "Plan",
    "PlannedBucket",
    "Problem",
    "QuantScheme",
    "QuantWeight",
    "Reason",
    "Rejected",
    "ResidentLayout",
    "Routing",
    "Scalar",
    "SingleLayout",
    "Status",
    "Support",
    "TokenBin",
    "TokenBucket",
    "WeightsAudit",
    "Workload",
    "check_properties",
]
