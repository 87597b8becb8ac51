"""Comparing a compiled model with eager, and an NPU in software: for users' own tests.

forge_ugc.testing.assert_fidelity(model, inputs)
forge_ugc.testing.software_npu()
"""

from __future__ import annotations

from .fidelity import TOLERANCE, Difference, Fidelity, assert_fidelity, differences
from .softnpu import SoftwareNpu, software_npu

__all__ = ["TOLERANCE", "Difference", "Fidelity", "SoftwareNpu", "assert_fidelity", "differences", "software_npu"]
