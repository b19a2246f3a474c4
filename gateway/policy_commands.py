"""What the commands of `surefoot policy` do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from surefoot.backends.types import BASELINE_PLAN, CachePlan
from surefoot.policies.base import Decision, Observation, Policy
from surefoot.policies.registry import PolicyError, load_policies, serving_policy
from surefoot.policies.replay import RecordError, Replay, read_records, replay

from .decode import did_you_mean
from .errors import InvalidValue
from .settings import SettingsError
from .situation import Situation
from .sla import Classes, ClassesError, check_tier, load_classes
from .tenant_files import DEFAULTS, TenantFile, TenantFileError
from .tenant_folder import Loaded, TenantFolder
from .tenant_values import EffectiveValue, effective_values
from .tenants import Tenant

EXIT_BAD_FILES = 2
"""The exit status of `check` for files that cannot be used."""


def check_folder(folder: Path, classes: Path | None) -> int:
    """Print every problem of a folder; returns the exit status. `classes` is a file of SLA classes."""
    try:
        state = TenantFolder(folder, _policies(), _classes(classes).names).load()
    except TenantFileError as error:
        for problem in error.problems:
            sys.stderr.write(f"{problem}\n")
        return EXIT_BAD_FILES
    with_defaults = f", with {DEFAULTS}" if state.defaults else ""
    number = "1 tenant is" if len(state.loaded) == 1 else f"{len(state.loaded)} tenants are"
    _say(f"{folder}: {number} fine{with_defaults}\n")
    return 0


def show_tenant(folder: Path, classes: Path | None, tenant_id: str) -> None:
    """Print what holds for a tenant. Raises `SettingsError` if there is none of that id."""
    loaded, defaults = _find(folder, _classes(classes), tenant_id)
    _say(_values_text(effective_values(loaded.tenant, loaded.file, defaults)))


def explain_plan(folder: Path, classes: Path | None, tenant_id: str, seen: Situation) -> None:
    """Print the decision for a request of a tenant. Raises `SettingsError`."""
    known = _classes(classes)
    loaded, _ = _find(folder, known, tenant_id)
    observation = _observation(loaded.tenant, known, seen)
    _say(_explanation(observation, serving_policy(_policies()).decide(observation)))


def replay_log(log: Path, policy: str | None) -> None:
    """Print which requests of a log would have had another plan. Raises `SettingsError`."""
    policies = _policies()
    if policy is not None and policy not in policies:
        raise SettingsError(f"there is no policy '{policy}'; known are {', '.join(policies)}")
    serving = serving_policy(policies)
    try:
        with log.open("rb") as lines:
            result = replay(read_records(lines), serving, policy)
    except OSError as error:
        raise SettingsError(f"{log} cannot be read: {error.strerror}") from error
    except RecordError as error:
        raise SettingsError(f"{log}: {error}") from error
    if not result.num_requests:
        raise SettingsError(
            f"{log} has no event request.planned: a server writes them with"
            " --log-format json --log-level debug"
        )
    _say(_replay_text(result))


def _find(folder: Path, classes: Classes, tenant_id: str) -> tuple[Loaded, TenantFile | None]:
    reader = TenantFolder(folder, _policies(), classes.names)
    # Of a folder with faults, what could be read can still be shown.
    state = reader.reload()
    if tenant_id not in state.loaded:
        for problem in state.problems:
            sys.stderr.write(f"{problem}\n")
        raise SettingsError(f"{folder}: no tenant '{tenant_id}'.{did_you_mean(tenant_id, state.loaded)}")
    return state.loaded[tenant_id], state.defaults


def _policies() -> dict[str, Policy]:
    try:
        return load_policies()
    except PolicyError as error:
        raise SettingsError(str(error)) from error


def _classes(file: Path | None) -> Classes:
    try:
        return load_classes(file)
    except ClassesError as error:
        raise SettingsError(str(error)) from error


def _observation(tenant: Tenant, classes: Classes, seen: Situation) -> Observation:
    return Observation(
        tenant_id=tenant.id,
        model=seen.model,
        policy=tenant.policy,
        service_class=_class_of(tenant, classes, seen.tier),
        kind=seen.kind,
        num_prompt_tokens=seen.prompt_tokens,
        cache_pressure=seen.cache_pressure,
        load=seen.load,
        acceptance=seen.acceptance,
        quality_loss=seen.quality_loss,
        hour=seen.hour,
        has_seed=seen.has_seed,
        bounds=tenant.bounds,
    )


def _class_of(tenant: Tenant, classes: Classes, tier: str) -> str:
    try:
        check_tier(tier)
    except InvalidValue as error:
        raise SettingsError(str(error)) from error
    return classes.promise(tier, tenant.classes).name


def _values_text(values: Sequence[EffectiveValue]) -> str:
    rows = [(each.key, _toml_text(each.value), each.origin) for each in values]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "".join(f"{key:{widths[0]}}  {value:{widths[1]}}  {origin}\n" for key, value, origin in rows)


def _toml_text(value: object) -> str:
    return "-" if value is None else msgspec.json.encode(value).decode()


def _explanation(observation: Observation, decision: Decision) -> str:
    plan = decision.plan
    rows = [
        ("asks", observation.policy, f"for tenant {observation.tenant_id}, class {observation.service_class}")
    ]
    rows += [("rule", each.rule, each.says) for each in decision.steps]
    rows.append(("plan", plan.name, decision.reason))
    width = max(len(name) for _, name, _ in rows)
    lines = [f"{kind}  {name:{width}}  {says}\n" for kind, name, says in rows]
    drafts = f"drafts of up to {plan.speculation.max_draft}" if plan.speculation.max_draft else "no drafts"
    return "".join(lines) + f"      {_cache_text(plan.cache)}; {drafts}\n"


def _cache_text(cache: CachePlan) -> str:
    words = [f"cache {cache.format}"]
    if cache.format != BASELINE_PLAN.cache.format:
        when = "at once" if cache.demote == "eager" else "when the cache is full"
        words.append(f"{when}, but for the first {cache.sinks} and the latest {cache.recent} tokens")
    if cache.max_context is not None:
        words.append(f"contexts of up to {cache.max_context} tokens")
    return ", ".join(words)


def _replay_text(result: Replay) -> str:
    num_changed = sum(result.changes.values())
    lines = [f"{result.num_requests} requests, of which {num_changed} would have had another plan\n"]
    for (before, after), count in result.changes.items():
        lines.append(f"{count:8}  {before} -> {after}: {result.reasons[before, after]}\n")
    return "".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(text)
