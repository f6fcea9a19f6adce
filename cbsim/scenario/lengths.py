"""Distributions of prompt and output lengths together that come with the project: quantiles, and their source."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from cbsim.scenario import catalog, documents
from cbsim.scenario.fields import Frozen, Whole, as_tuple, bare, complaint, near, shown

FOLDER = "lengths"


def _in_order(quantiles: tuple[int, ...]) -> tuple[int, ...]:
    for before, after in pairwise(quantiles):
        if after < before:
            raise complaint(f"got {after} after {before}, expected quantiles in order")
    return quantiles


Quantiles = Annotated[
    tuple[Annotated[Whole, Field(ge=1)], ...],
    Field(min_length=2),
    BeforeValidator(as_tuple),
    AfterValidator(_in_order),
]


class LengthTable(Frozen):
    """Quantiles at equal steps from the least to the most. Requests are in groups of equal size by their prompts, and
    `output_tokens` holds the quantiles of each group, that of the shortest prompts first.
    """

    name: str
    source: str
    most_tokens: Whole
    """Prompt and output together are no longer."""
    prompt_tokens: Quantiles
    output_tokens: Annotated[tuple[Quantiles, ...], Field(min_length=1), BeforeValidator(as_tuple)]


def load(name: str) -> LengthTable:
    """The distribution of that name, or in the file of that path. Raises ScenarioError."""
    document = documents.read(catalog.shape(FOLDER, name))
    try:
        return LengthTable.model_validate(document.data)
    except ValidationError as error:
        raise document.explain(error) from None


def _known(value: Any) -> Any:
    """The name of a distribution as the catalog has it."""
    known = catalog.names(FOLDER)
    for name in known if isinstance(value, str) else ():
        if bare(name) == bare(value):
            return name
    raise complaint(f"got {shown(value)}, expected one of {', '.join(known)}{near(value, known)}")


LengthsName = Annotated[str, BeforeValidator(_known)]
