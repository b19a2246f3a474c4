"""`surefoot policy`: check tenant files, show what holds for a tenant, and say what a policy would decide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from .setting_flags import ConfigFlag
from .settings import SettingsError, resolve
from .situation import Situation

POLICY = "Check tenant files and see what they lead to."

CHECK = """\
Check all tenant files of a folder, as the server would read them.

Each fault is a line with the file, the line and the key; the exit status is 2 then.

    surefoot policy check
    surefoot policy check examples/tenants
"""

SHOW = """\
Show what holds for a tenant, value by value, and where each comes from.

A value comes from the tenant's own file, from defaults.toml or is built in:

    surefoot policy show acme --tenants tenants
"""

EXPLAIN = """\
Say which plan a request would get, and why, rule by rule.

What is not given is as in a server with nothing to do:

    surefoot policy explain --tenant acme --tenants tenants
    surefoot policy explain --tenant acme --tier flex --prompt-tokens 3000 \\
        --cache-pressure 0.8 --acceptance 0.6
"""

REPLAY = """\
Ask a policy about recorded requests: which would have had another plan?

The log is that of a server with --log-format json --log-level debug. Without
--policy it is asked what the tenants' own policies say in this version:

    surefoot policy replay surefoot.log
    surefoot policy replay surefoot.log --policy adaptive
"""

TenantsFlag = Annotated[
    Path | None, Parameter(name="--tenants", help="Folder of tenant files (or SUREFOOT_TENANTS)")
]
FolderArgument = Annotated[Path | None, Parameter(help="Folder of tenant files (or SUREFOOT_TENANTS)")]
TenantArgument = Annotated[str, Parameter(help="The tenant's id")]
TenantFlag = Annotated[str, Parameter(name="--tenant", help="The tenant's id")]
LogArgument = Annotated[Path, Parameter(help="Log in JSON lines")]
PolicyFlag = Annotated[str | None, Parameter(name="--policy", help="Name of the policy to ask")]
SituationFlags = Annotated[Situation, Parameter(name="*")]
NOTHING_KNOWN = Situation()


def build_policy_app(environ: Mapping[str, str]) -> App:
    """The commands, for an environment."""
    app = App(name="policy", help=POLICY)

    def files_of(given: Path | None, config: Path | None) -> tuple[Path, Path | None]:
        """The folder of tenant files, and the file of SLA classes."""
        settings = resolve({}, environ, config).settings
        folder = given or settings.tenants
        if folder is None:
            raise SettingsError("no folder of tenant files: name one, or set SUREFOOT_TENANTS")
        return folder, settings.classes

    # The commands' module brings the web framework along, which takes a while to import.

    @app.command(name="check", help=CHECK)
    def check(folder: FolderArgument = None, *, config: ConfigFlag = None) -> int:
        from .policy_commands import check_folder

        return check_folder(*files_of(folder, config))

    @app.command(name="show", help=SHOW)
    def show(tenant: TenantArgument, *, tenants: TenantsFlag = None, config: ConfigFlag = None) -> None:
        from .policy_commands import show_tenant

        show_tenant(*files_of(tenants, config), tenant)

    @app.command(name="explain", help=EXPLAIN)
    def explain(
        *,
        tenant: TenantFlag,
        tenants: TenantsFlag = None,
        config: ConfigFlag = None,
        seen: SituationFlags = NOTHING_KNOWN,
    ) -> None:
        from .policy_commands import explain_plan

        explain_plan(*files_of(tenants, config), tenant, seen)

    @app.command(name="replay", help=REPLAY)
    def replay(log: LogArgument, *, policy: PolicyFlag = None) -> None:
        from .policy_commands import replay_log

        replay_log(log, policy)

    return app
