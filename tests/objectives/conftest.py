"""Random token tensors with ratios on both sides of every clip."""

import numpy as np
import pytest

from tests.objectives.reference import TokenCase


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(params=["padded", "packed"])
def case(request: pytest.FixtureRequest, rng: np.random.Generator) -> TokenCase:
    """[6, 9] padded or [54] packed tokens in float64."""
    case = TokenCase.random(rng, (6, 9))
    return case if request.param == "padded" else case.packed()
