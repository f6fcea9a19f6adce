"""The registries of routers and of rules of autoscaling: ours by name, a user's own by entry point or as
`package.module:KIND`.
"""

from __future__ import annotations

from typing import Any

from cbsim.routers.base import RouterKind
from cbsim.routers.scaling import HPA, RuleKind
from cbsim.routers.simple import SIMPLE
from cbsim.schedulers.registry import Ours, Registry

Kind = RouterKind[Any]
HOMES = {
    "dynamo": "cbsim.routers.dynamo:DYNAMO",
    "llmd": "cbsim.routers.llmd:LLMD",
    "mooncake_conductor": "cbsim.routers.mooncake:CONDUCTOR",
    "preble": "cbsim.routers.preble:PREBLE",
    "production_stack_prefixaware": "cbsim.routers.production_stack:PREFIX_AWARE",
    "sglang_cache_aware": "cbsim.routers.sglang:CACHE_AWARE",
}
OURS = Ours[Any](sorted([*HOMES.items(), *((kind.name, kind) for kind in SIMPLE)], key=lambda named: named[0]))
GROUP = "cbsim.routers"  # of entry points that name a `RouterKind` each
ROUTERS = Registry[Kind]("router", GROUP, RouterKind, OURS)

RULES_OURS: dict[str, RuleKind[Any]] = {HPA.name: HPA}
RULES = Registry[RuleKind[Any]]("rule", "cbsim.autoscalers", RuleKind, RULES_OURS)
