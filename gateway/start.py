"""From settings to a running server: the one place where the gateway meets the engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from surefoot.backends.catalog import default_model_id, locate_model
from surefoot.backends.engine.device import find_device
from surefoot.backends.engine.limits import available_memory_bytes
from surefoot.backends.engine.loss import LossSettings, measure_loss
from surefoot.backends.engine.loss import report_text as loss_text
from surefoot.backends.engine.loss_errors import LossError
from surefoot.backends.engine.model_errors import DeviceNotFound, ModelError, ModelNotFound
from surefoot.backends.engine.process_memory import spare_collector
from surefoot.backends.engine.quality.measure import (
    QualitySettings,
    make_report_folder,
    measure_quality,
    write_report,
)
from surefoot.backends.engine.quality.report import report_plot
from surefoot.backends.engine.quality.report import report_text as quality_text
from surefoot.backends.engine.settings import EngineSettings
from surefoot.backends.engine.simulation import SimulationSettings, simulate_machine
from surefoot.backends.engine.simulation_report import report_text as simulation_text
from surefoot.backends.engine.speculation.settings import SpeculationSettings
from surefoot.backends.engine.start import EngineOptions, make_backend
from surefoot.backends.engine.trace import Promise, TraceError
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.policies.registry import load_policies, serving_policy

from .admin import AdminKey
from .app import create_app
from .http_settings import HttpSettings
from .logs import configure_logs
from .server import serve
from .setting_types import ByteSize
from .settings import ServeSettings, SettingsError, check_exposure
from .sla import Classes, ClassesError, load_classes
from .tenant_folder import TenantFolder
from .tenant_watch import TenantWatch
from .tenants import Tenants, local_tenant
from .usage_store import UsageStore

EXIT_NO_MODEL = 1
"""The exit status for a model that cannot be loaded."""


def run_gateway(settings: ServeSettings, usage_file: Path | None) -> int:
    """Serve until told to stop; returns the process's exit status. Without `usage_file` usage is not kept.

    Raises `SettingsError`, `PolicyError`, `TenantFileError`, `ClassesError`, `UsageError` or `ModelNotFound`
    before anything is started.
    """
    configure_logs(settings.log_format, settings.log_level)
    policies = load_policies()
    classes = load_classes(settings.classes)
    tenants, watch = load_tenants(settings, policies.keys(), classes.names)
    check_exposure(settings.host, tenants.keys_required)
    # The engine's thread runs Python between its ops; a short turn keeps the event loop on time beside it.
    sys.setswitchinterval(0.001)
    backend = make_backend(engine_options(settings), progress=_tell)
    http = HttpSettings(
        max_body_bytes=int(settings.max_body_bytes), keep_alive_s=settings.keep_alive_s, classes=classes
    )
    app = create_app(
        [backend],
        tenants,
        serving_policy(policies),
        http,
        admin_key=AdminKey(settings.admin_key_hash),
        watch=watch,
        usage_store=None if usage_file is None else UsageStore(usage_file),
    )

    def on_ready(url: str) -> None:
        spare_collector()
        _tell(invitation(url, backend.models[0].id))

    status = serve(app, settings.host, settings.port, settings.drain_s, on_ready)
    if not app.state.lifecycle.started.is_set():
        # The model is still being loaded: the interpreter's end would tear that thread out of C++ code, which
        # aborts the process.
        sys.stdout.flush()
        os._exit(status)
    return status


def run_loss(
    settings: ServeSettings, files: Sequence[Path], num_tokens: int, window: int, *, as_json: bool
) -> int:
    """Measure the loss of the settings' weights and print it; as `_print_report`."""

    def report() -> tuple[Struct, str]:
        what = LossSettings(files=tuple(files), num_tokens=num_tokens, window=window)
        measured = measure_loss(engine_options(settings), what, progress=_tell)
        return measured, loss_text(measured)

    return _print_report(settings, report, as_json=as_json)


def run_quality(
    settings: ServeSettings, what: Mapping[str, Any], folder: Path | None, *, as_json: bool
) -> int:
    """Measure cache plans against full precision and print the report; as `_print_report`.

    `what` has the fields of `QualitySettings`.
    """

    def report() -> tuple[Struct, str]:
        if folder is not None:
            make_report_folder(folder)
        measured = measure_quality(engine_options(settings), QualitySettings(**what), progress=_tell)
        text = quality_text(measured)
        if folder is not None:
            write_report(measured, folder, text, report_plot(measured))
        return measured, text

    return _print_report(settings, report, as_json=as_json)


def run_simulation(settings: ServeSettings, what: Mapping[str, Any], *, as_json: bool) -> int:
    """Simulate the settings' server and print what it would promise; as `_print_report`.

    `what` has the fields of `SimulationSettings`.
    """

    def report() -> tuple[Struct, str]:
        asked, promises = SimulationSettings(**what), _promises(load_classes(settings.classes))
        simulated = simulate_machine(engine_options(settings), asked, promises, progress=_tell)
        return simulated, simulation_text(simulated)

    return _print_report(settings, report, as_json=as_json)


def _print_report(settings: ServeSettings, report: Callable[[], tuple[Struct, str]], *, as_json: bool) -> int:
    """Print a report that is made now, its text or as JSON; returns the process's exit status.

    Raises `SettingsError` for what is of no use.
    """
    configure_logs(settings.log_format, settings.log_level)
    try:
        content, text = report()
    except (LossError, TraceError, ClassesError, ModelNotFound) as error:
        raise SettingsError(str(error)) from error
    except ModelError as error:
        _tell(f"surefoot: the model could not be loaded: {error}")
        return EXIT_NO_MODEL
    sys.stdout.write(_json(content) if as_json else text)
    return 0


def _promises(classes: Classes) -> dict[str, Promise]:
    """What each class stands for in the scheduler's terms."""
    return {
        name: Promise(priority=sla.priority, ttft_target_s=sla.ttft_target_s, tpot_target_s=sla.tpot_target_s)
        for name, sla in classes.by_name.items()
    }


def load_tenants(
    settings: ServeSettings, policies: Collection[str], classes: Collection[str]
) -> tuple[Tenants, TenantWatch | None]:
    """The tenants of the settings' folder, and what keeps them up to date. Raises `TenantFileError`."""
    if settings.tenants is None:
        return Tenants(local=local_tenant(settings.local_max_draft, settings.local_cache_format)), None
    folder = TenantFolder(settings.tenants, policies, classes)
    tenants = Tenants(folder.load().tenants, keys_required=True)
    return tenants, TenantWatch(folder, tenants, settings.tenants_reload_s)


def engine_options(settings: ServeSettings) -> EngineOptions:
    """What of the settings concerns the engine. `SettingsError` where device or memory is not there, or where
    one is for another device.
    """
    try:
        device = find_device(settings.device)
    except DeviceNotFound as error:
        raise SettingsError(str(error)) from error
    if device.type == "cpu":
        _check_for_cpu(settings)
    return EngineOptions(
        model=locate_model(settings.model),
        model_id=settings.served_model_id or default_model_id(settings.model),
        cache_dir=settings.cache_dir,
        settings=EngineSettings(
            cache_bytes=settings.cache_memory,
            max_model_len=settings.max_model_len,
            max_sequences=settings.max_sequences,
            max_batched_tokens=settings.max_batched_tokens,
            max_waiting=settings.max_waiting,
            prefix_cache=settings.prefix_cache == "on",
            max_waiting_s=settings.max_waiting_s,
            headroom=settings.headroom,
            watchdog_s=settings.watchdog_s,
            speculation=SpeculationSettings(
                max_draft=settings.max_draft,
                synthetic_acceptance=settings.synthetic_acceptance,
                draft_cache_bytes=settings.draft_cache_memory,
            ),
        ),
        device=device,
        weights=WeightMode.NATIVE if settings.weights == "auto" else WeightMode(settings.weights),
        batch_invariant=settings.batch_invariant == "on",
        threads=settings.threads,
        scheduler=settings.scheduler,
        draft_model=None if settings.draft_model is None else locate_model(settings.draft_model),
    )


def _check_for_cpu(settings: ServeSettings) -> None:
    """Refuse what a CPU has no use for or no room for."""
    if settings.batch_invariant == "on":
        raise SettingsError(
            "batch_invariant = on: the model runs on the CPU, where no answer's bits depend on the batch and"
            " nothing is to be paid for it. Leave it off, or set device = cuda"
        )
    if settings.cache_memory is not None:
        _check_memory(settings.cache_memory)


def _check_memory(cache_memory: ByteSize) -> None:
    """Refuse a cache that memory has no room for: it is taken page by page, so the end would come later."""
    available = available_memory_bytes()
    if cache_memory > available:
        raise SettingsError(
            f"cache_memory = {cache_memory}: this process can have {available / 1024**3:.1f} GiB at the"
            " moment. Lower it, or leave it at auto"
        )


def invitation(url: str, model_id: str) -> str:
    """What to type now."""
    return f"""
Serving {model_id} at {url}. Try it:

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
"""


def _json(report: Struct) -> str:
    return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
