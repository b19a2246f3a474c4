"""From settings to a running server: the one place where the gateway meets the engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from surefoot.backends.catalog import default_model_id, locate_model
from surefoot.backends.engine.loss import LossSettings, measure_loss, report_text
from surefoot.backends.engine.loss_errors import LossError
from surefoot.backends.engine.model_errors import ModelError, ModelNotFound
from surefoot.backends.engine.start import EngineOptions, make_backend
from surefoot.backends.engine.weight_mode import WeightMode
from surefoot.policies.baseline import BaselinePolicy

from .app import create_app
from .http_settings import HttpSettings
from .logs import configure_logs
from .server import serve
from .settings import ServeSettings, SettingsError, check_exposure
from .sla import Classes, load_classes
from .tenants import Tenants, load_tenants
from .usage_store import UsageStore

SHARED_WITH_ENGINE = (
    "cache_dir",
    "max_batched_tokens",
    "max_model_len",
    "max_sequences",
    "max_waiting",
    "threads",
    "watchdog_s",
)
"""Settings that reach the engine under their own name."""

EXIT_NO_MODEL = 1
"""The exit status for a model that cannot be loaded."""


def run_gateway(settings: ServeSettings, usage_file: Path | None) -> int:
    """Serve until told to stop; returns the process's exit status. Without `usage_file` usage is not kept.

    Raises `SettingsError`, `TenantFileError`, `ClassesError`, `UsageError` or `ModelNotFound` before anything
    is started.
    """
    configure_logs(settings.log_format, settings.log_level)
    tenants = Tenants() if settings.tenants is None else load_tenants(settings.tenants)
    check_exposure(settings.host, tenants.keys_required)
    classes = Classes() if settings.classes is None else load_classes(settings.classes)
    for tenant in tenants.everyone:
        classes.check_tenant(tenant)
    # The engine's thread runs Python between its ops; a short turn keeps the event loop on time beside it.
    sys.setswitchinterval(0.001)
    backend = make_backend(engine_options(settings), progress=_tell)
    http = HttpSettings(
        max_body_bytes=int(settings.max_body_bytes),
        keep_alive_s=settings.keep_alive_s,
        classes=classes,
        admin_key_hash=settings.admin_key_hash,
    )
    usage_store = None if usage_file is None else UsageStore(usage_file)
    app = create_app([backend], tenants, BaselinePolicy(), http, usage_store=usage_store)
    return serve(
        app,
        settings.host,
        settings.port,
        settings.drain_s,
        lambda url: _tell(invitation(url, backend.models[0].id)),
    )


def run_loss(
    settings: ServeSettings, files: Sequence[Path], num_tokens: int, window: int, *, as_json: bool
) -> int:
    """Measure the loss of the settings' weights and print it; returns the process's exit status.

    Raises `SettingsError` for what cannot be measured.
    """
    configure_logs(settings.log_format, settings.log_level)
    try:
        what = LossSettings(files=tuple(files), num_tokens=num_tokens, window=window)
        report = measure_loss(engine_options(settings), what, progress=_tell)
    except (LossError, ModelNotFound) as error:
        raise SettingsError(str(error)) from error
    except ModelError as error:
        _tell(f"surefoot: the model could not be loaded: {error}")
        return EXIT_NO_MODEL
    text = (
        msgspec.json.format(msgspec.json.encode(report)).decode() + "\n" if as_json else report_text(report)
    )
    sys.stdout.write(text)
    return 0


def engine_options(settings: ServeSettings) -> EngineOptions:
    """What of the settings concerns the engine."""
    values = asdict(settings)
    return EngineOptions(
        model=locate_model(settings.model),
        model_id=settings.served_model_id or default_model_id(settings.model),
        weights=WeightMode.NATIVE if settings.weights == "auto" else WeightMode(settings.weights),
        cache_bytes=settings.cache_memory,
        **{name: values[name] for name in SHARED_WITH_ENGINE},
    )


def invitation(url: str, model_id: str) -> str:
    """What to type now."""
    return f"""
Serving {model_id} at {url}. Try it:

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
"""


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
