"""The registries of routers and of rules of autoscaling: ours by name, a user's own by entry point or as
`package.module:KIND`.
"""

from __future__ import annotations

from typing import Any

from cbsim.routers.base import RouterKind
from cbsim.routers.dynamo import DYNAMO
from cbsim.routers.llmd import LLMD
from cbsim.routers.mooncake import CONDUCTOR
from cbsim.routers.preble import PREBLE
from cbsim.routers.production_stack import PREFIX_AWARE
from cbsim.routers.scaling import HPA, RuleKind
from cbsim.routers.sglang import CACHE_AWARE
from cbsim.routers.simple import SIMPLE
from cbsim.schedulers.registry import Registry

Kind = RouterKind[Any]
KINDS: tuple[Kind, ...] = (*SIMPLE, CACHE_AWARE, CONDUCTOR, DYNAMO, LLMD, PREBLE, PREFIX_AWARE)
OURS: dict[str, Kind] = {kind.name: kind for kind in sorted(KINDS, key=lambda kind: kind.name)}
GROUP = "cbsim.routers"  # of entry points that name a `RouterKind` each
ROUTERS = Registry[Kind]("router", GROUP, RouterKind, OURS)

RULES_OURS: dict[str, RuleKind[Any]] = {HPA.name: HPA}
RULES = Registry[RuleKind[Any]]("rule", "cbsim.autoscalers", RuleKind, RULES_OURS)
