"""The `scheduler` of a scenario, the router of a fleet and the rule of a pool: looked up by name, with settings checked
like every other part of the file.

A kind's settings are a plain dataclass (policy/kind.py); the pydantic model that checks them is derived from it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic_core import core_schema

from cbsim.errors import in_line
from cbsim.policy.kind import Settings, SettingsError
from cbsim.policy.marks import AsText, AtLeast, Below
from cbsim.routers import registry as routers
from cbsim.scenario.fields import By, Frozen, Real, Whole, complaint, near, shown
from cbsim.schedulers import registry as schedulers
from cbsim.schedulers.registry import KindError, Registry


class ByName(By):
    """A mark by which pydantic reads the settings of a kind of a registry from fields or settings, and writes them as
    fields.
    """

    def __init__(self, registry: Registry[Any], ours: Mapping[str, Any]) -> None:
        super().__init__("name")
        self._registry, self._ours = registry, ours

    def member(self, name: str) -> type[Frozen] | None:
        try:
            return self._usable(name)[1]
        except KindError:
            return None

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        del union, handler
        writing = core_schema.plain_serializer_function_ser_schema(plain)
        return core_schema.no_info_plain_validator_function(self.settings, serialization=writing)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        del schema
        alike: dict[Any, list[str]] = {}  # kinds with the same settings share a model
        for kind in self.kinds().values():
            if not isinstance(kind, KindError):
                alike.setdefault(kind.settings, []).extend([kind.name] * self._is_ours(kind))
        models = [_model(settings, tuple(names)) for settings, names in alike.items()]
        for model in models:
            model.model_rebuild()
        return handler(core_schema.union_schema([model.__pydantic_core_schema__ for model in models]))

    def kinds(self) -> dict[str, Any]:
        """Return every kind that has a name, or the error for an installed one that cannot be used."""
        found: dict[str, Any] = {}
        for name in self._registry.names():
            try:
                found[name] = self._usable(name)[0]
            except KindError as error:
                found[name] = error
        return found

    def settings(self, value: Any) -> Settings:
        """Return the settings that a part of a scenario describes. Raises PydanticCustomError."""
        if isinstance(value, Settings):
            return value
        if not isinstance(value, dict):
            known = ", ".join(self._registry.names())
            raise complaint(f"got {shown(value)}, expected fields, of which `name` is one of {known}")
        kind, model = self._kind(value.get("name"))
        checked = model.model_validate(value)
        try:
            made: Settings = kind.settings(**{name: getattr(checked, name) for name in type(checked).model_fields})
            return made
        except SettingsError as error:
            raise complaint(str(error), error.field) from None
        except (Exception, SystemExit) as error:  # a user's own code may raise anything
            if kind.name in self._ours:
                raise
            raise complaint(f"{value['name']} cannot take its settings: {in_line(error)}") from error

    def _usable(self, name: str) -> tuple[Any, type[Frozen]]:
        kind = self._registry.find(name)
        try:
            return kind, _model(kind.settings, (kind.name,) if self._is_ours(kind) else ())
        except Exception as error:  # no dataclass, an annotation that pydantic does not know or that does not exist
            problem = f"{name!r} has settings that cannot be checked: {in_line(error)}"
            raise KindError(problem) from error

    def _kind(self, name: Any) -> tuple[Any, type[Frozen]]:
        try:
            if isinstance(name, str):
                return self._usable(name)
        except KindError as error:
            if name in self._registry.names() or ":" in name:
                raise complaint(f"got {shown(name)}: {error}", "name") from None
        known = self._registry.names()
        if name is None:
            raise complaint(f"is required: one of {', '.join(known)}", "name")
        allowed = f"one of {', '.join(known)}, or module:KIND of your own"
        raise complaint(f"got {shown(name)}, expected {allowed}{near(name, known)}", "name")

    def _is_ours(self, kind: Any) -> bool:
        return self._ours.get(kind.name) is kind


def plain(value: Settings) -> dict[str, Any]:
    """Return settings as fields of a file."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


@cache
def _model(kind_settings: Any, names: tuple[str, ...]) -> type[Frozen]:
    hints = get_type_hints(kind_settings, include_extras=True)
    name: Any = Literal[names] if names else str  # a user's own kind has the name by which it was found
    parts: dict[str, Any] = {"name": (name, Field(description=" or ".join(names)))}
    for field in fields(kind_settings):
        if field.name != "name":
            default = field.default if field.default is not MISSING else ...
            parts[field.name] = checked_type(hints[field.name]), Field(default, validate_default=True)
    made = create_model(kind_settings.__name__, __base__=Frozen, __doc__=kind_settings.__doc__, **parts)
    made.described = kind_settings
    return made


def checked_type(hint: Any) -> Any:
    """Return a setting's annotation for pydantic: whole numbers may be written 1e6, bounds become constraints."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        annotated = checked_type(arguments[0])
        for mark in arguments[1:]:
            if isinstance(mark, AtLeast):
                annotated = Annotated[annotated, Field(ge=mark.least)]
            elif isinstance(mark, Below):
                annotated = Annotated[annotated, Field(lt=mark.bound)]
            elif isinstance(mark, AsText):
                annotated = Annotated[annotated, BeforeValidator(_text)]
        return annotated
    if arguments and origin is not Literal:
        return reduce(or_, map(checked_type, arguments))
    return {int: Whole, float: Real}.get(hint, hint)


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, float) else value


SCHEDULERS = ByName(schedulers.SCHEDULERS, schedulers.OURS)
ROUTERS = ByName(routers.ROUTERS, routers.OURS)
RULES = ByName(routers.RULES, routers.RULES_OURS)
Scheduler = Annotated[Settings, SCHEDULERS]
Router = Annotated[Settings, ROUTERS]
Rule = Annotated[Settings, RULES]
