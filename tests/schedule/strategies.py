"""What the property tests draw from: exact costs, so that identities hold to the last digit."""

from fractions import Fraction

from hypothesis import strategies as st

times = st.integers(1, 60).map(lambda n: Fraction(n, 12))
"""The time of an action: more than nothing, and rarely a round number."""

shares = st.integers(0, 12).map(lambda n: Fraction(n, 12))
"""Some part of something, from none to all."""
