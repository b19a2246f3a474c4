"""A folder of tenant files that is read again as it changes.

Only files that changed are read. One that cannot be used leaves its tenant as it was before; a new one is
left out. Defaults that cannot be used leave everything as it was. What holds is one frozen `FolderState`.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from .sla import DEFAULT_CLASSES
from .tenant_files import (
    DEFAULTS,
    KnownNames,
    Problem,
    TenantFile,
    TenantFileError,
    check_defaults,
    make_tenant,
    read_file,
)
from .tenants import Tenant

SETTLED_NS = 50_000_000
"""A file that is younger when it is read may change again within one tick of the file system's clock."""

Signature = tuple[int, int, int]
UNSETTLED: Signature = (0, 0, 0)
"""Of a file that is to be read again next time."""


class Loaded(Struct, frozen=True):
    """A tenant and the file that says so."""

    tenant: Tenant
    file: TenantFile


class FolderState(Struct, frozen=True):
    """What holds: tenants by their id, the defaults, and what could not be used."""

    loaded: Mapping[str, Loaded] = field(default_factory=dict)
    defaults: TenantFile | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants."""
        return [each.tenant for each in self.loaded.values()]


class Entry(Struct, frozen=True):
    """One file: what it says now (None, and the problem, if that is of no use), and what is in use of it."""

    signature: Signature | None
    file: TenantFile | None = None
    latest: Loaded | None = None
    current: Loaded | None = None
    problem: Problem | None = None


class TenantFolder:
    """Reads a folder of files, which may name these policies and SLA classes. Not for two threads at once."""

    def __init__(
        self, folder: Path, policies: Collection[str], classes: Collection[str] = tuple(DEFAULT_CLASSES)
    ) -> None:
        self._folder = folder
        self._known = KnownNames(policies, classes)
        self._entries: dict[str, Entry] = {}
        self._defaults = Entry(None)
        self._unreadable: Problem | None = None
        self.state = FolderState()
        self.num_read = 0
        """Files that were read so far."""

    def load(self) -> FolderState:
        """Read everything. Raises `TenantFileError`, with all problems, also where there is no tenant."""
        if not self._folder.is_dir():
            raise TenantFileError(Problem(str(self._folder), None, "no such folder"))
        with _no_collector():
            self.reload()
        if self.state.problems:
            raise TenantFileError(*self.state.problems)
        if not self.state.loaded:
            # Whoever names a folder means to ask for keys; to serve everybody would be a surprise.
            message = (
                "no tenant file (*.toml) in this folder. Make a key with `surefoot key new` and put its line,"
                f" with an id, into {self._folder / 'NAME.toml'}; or name no folder, to serve this machine"
                " alone, without keys"
            )
            raise TenantFileError(Problem(str(self._folder), None, message))
        return self.state

    def reload(self) -> FolderState:
        """Read what changed since the last time; never raises. The same object again if nothing did."""
        try:
            found = dict(_scan(self._folder))
        except OSError as error:
            self._unreadable = Problem(str(self._folder), None, error.strerror or str(error))
            self._publish()
            return self.state
        was_unreadable, self._unreadable = self._unreadable, None
        defaults_changed = self._read_defaults(found.pop(DEFAULTS, None))
        changed = [name for name, signature in found.items() if self._signature(name) != signature]
        gone = self._entries.keys() - found.keys()
        for name in gone:
            del self._entries[name]
        for name in changed:
            self._read(name, found[name])
        if defaults_changed:
            for name in self._entries.keys() - set(changed):
                self._entries[name] = self._made(self._entries[name])
        if changed or gone or defaults_changed or was_unreadable:
            self._settle()
            self._publish()
        return self.state

    def _signature(self, name: str) -> Signature | None:
        entry = self._entries.get(name)
        return entry.signature if entry else None

    def _read_defaults(self, signature: Signature | None) -> bool:
        """Read the defaults if they changed; says whether they did, for better or worse."""
        before = self._defaults
        if signature == before.signature:
            return False
        if signature is None:
            self._defaults = Entry(None)
            return True
        try:
            file = self._read_toml(DEFAULTS)
            check_defaults(file, self._known)
            self._defaults = Entry(_settled(signature), file)
        except TenantFileError as error:
            self._defaults = replace(before, signature=_settled(signature), problem=error.problems[0])
        return True

    def _read(self, name: str, signature: Signature) -> None:
        before = self._entries.get(name, Entry(None))
        try:
            entry = replace(before, signature=_settled(signature), file=self._read_toml(name))
            self._entries[name] = self._made(entry)
        except TenantFileError as error:
            self._entries[name] = replace(
                before, signature=_settled(signature), file=None, latest=None, problem=error.problems[0]
            )

    def _read_toml(self, name: str) -> TenantFile:
        self.num_read += 1
        return read_file(self._folder / name)

    def _made(self, entry: Entry) -> Entry:
        """The entry with the tenant that its file makes under the defaults as they are."""
        if entry.file is None:
            return entry
        try:
            tenant = make_tenant(entry.file, self._default_values, self._known)
        except TenantFileError as error:
            return replace(entry, latest=None, problem=error.problems[0])
        return replace(entry, latest=Loaded(tenant, entry.file), problem=None)

    @property
    def _default_values(self) -> Mapping[str, Any]:
        return self._defaults.file.values if self._defaults.file else {}

    def _settle(self) -> None:
        """Decide what is in use of each file: the latest if nothing is against it, else what was before."""
        clashes = _find_clashes(self._entries)
        for name, entry in self._entries.items():
            if entry.latest is None:
                continue
            clash = clashes.get(name)
            self._entries[name] = replace(
                entry, problem=clash, current=entry.current if clash else entry.latest
            )

    def _publish(self) -> None:
        used = [entry.current for entry in self._entries.values() if entry.current is not None]
        found = [self._unreadable, self._defaults.problem, *(each.problem for each in self._entries.values())]
        self.state = FolderState(
            {each.tenant.id: each for each in used},
            self._defaults.file,
            tuple(problem for problem in found if problem),
        )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Within the block no cyclic garbage is looked for: a sixth of the time that thousands of files take."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _scan(folder: Path) -> Iterator[tuple[str, Signature]]:
    """The files of a folder that count, by name, and what tells one state of a file from another."""
    with os.scandir(folder) as found:
        names = sorted((each.name, each) for each in found if _counts(each.name))
    for name, each in names:
        yield name, _signature_of(each)


def _signature_of(found: os.DirEntry[str]) -> Signature:
    try:
        status = found.stat()
    except OSError:  # A link to nowhere, say: reading it will tell.
        return UNSETTLED
    return status.st_mtime_ns, status.st_size, status.st_ino


def _counts(name: str) -> bool:
    return name.endswith(".toml") and not name.startswith(".")


def _settled(signature: Signature) -> Signature:
    """The signature, unless the file is so young that it has to be read again."""
    return UNSETTLED if 0 <= time.time_ns() - signature[0] < SETTLED_NS else signature


def _find_clashes(entries: Mapping[str, Entry]) -> dict[str, Problem]:
    """Files whose latest tenant has an id or a key that another one in use has.

    What is in use already goes first, then the others by name. A file that loses goes back to what it had,
    which may stand against another new one; so this goes on until nothing more is lost.
    """
    clashes: dict[str, Problem] = {}
    while True:
        old, new = [], []
        for name, entry in entries.items():
            if entry.latest is None or entry.latest is entry.current or name in clashes:
                old += [entry.current] if entry.current else []
            else:
                new.append((name, entry.latest))
        lost = _losers(old, sorted(new, key=lambda each: each[0]))
        if not lost:
            return clashes
        clashes |= lost


def _losers(old: Iterable[Loaded], new: Iterable[tuple[str, Loaded]]) -> dict[str, Problem]:
    """Those of the new ones that want what an old one, or one before them, has."""
    owners = {claim: each for each in old for claim in _claims(each.tenant)}
    lost = {}
    for name, each in new:
        claims = _claims(each.tenant)
        taken = next((claim for claim in claims if claim in owners), None)
        if taken is None:
            owners |= dict.fromkeys(claims, each)
        else:
            message = f"the {claims[taken]} is also in {owners[taken].file.path}"
            lost[name] = Problem(str(each.file.path), None, message)
    return lost


def _claims(tenant: Tenant) -> dict[str, str]:
    """What no other tenant may have, and how to say it: of a hash the first digits only."""
    return {tenant.id: f"id '{tenant.id}'"} | {
        key.hash: f"key hash '{key.hash[:15]}…'" for key in tenant.all_keys
    }
