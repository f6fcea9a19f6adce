"""What layers see, against every query token's own list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbsim.policy.groups import FULL, Attention, Sight

attentions = st.one_of(
    st.just(FULL), st.builds(Attention, st.sampled_from((Sight.SLIDING, Sight.CHUNKED)), st.integers(1, 9))
)


def sees(attention: Attention, place: int) -> set[int]:
    """Places that the query token at `place` attends to."""
    if attention.sight is Sight.SLIDING:
        return {i for i in range(place + 1) if place - i < attention.span}
    if attention.sight is Sight.CHUNKED:
        return {i for i in range(place + 1) if i // attention.span == place // attention.span}
    return set(range(place + 1))


@given(attention=attentions, start=st.integers(0, 30), tokens=st.integers(1, 30))
def test_what_query_tokens_see(attention: Attention, start: int, tokens: int) -> None:
    """Pairs, tokens read, and those that nobody sees from here on."""
    lists = [sees(attention, place) for place in range(start, start + tokens)]
    assert attention.pairs(start, tokens) == sum(map(len, lists))
    assert attention.seen(start, tokens) == len(set.union(*lists))
    assert attention.gone(start) == min(sees(attention, start))
