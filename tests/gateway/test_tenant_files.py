"""Tenant files: what they inherit, where their faults are, and how a running server follows them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from surefoot.gateway.tenant_files import TenantFileError
from surefoot.gateway.tenant_folder import FolderState, TenantFolder
from surefoot.gateway.tenant_values import effective_values
from surefoot.gateway.tenants import Tenant, Tenants, hash_key
from surefoot.gateway.tenants_bench import measure
from surefoot.gateway.toml_lines import line_of
from surefoot.policies.registry import BUILT_IN
from surefoot.policies.testkit import count_calls

HASHES = [hash_key(f"key {i}") for i in range(6)]


class Folder:
    """A folder of tenant files. What it writes is old enough to count as settled, and newer each time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = TenantFolder(path, BUILT_IN)
        self._age = 10**9

    def write(self, name: str, text: str) -> None:
        """Write or replace a file."""
        file = self.path / name
        file.write_text(text)
        self._age += 1
        os.utime(file, (self._age, self._age))

    def tenant(self, number: int, extra: str = "", *, key: int | None = None, id: str | None = None) -> None:
        """Write `t<number>.toml`, with the id and key of that number unless told otherwise."""
        key_hash = HASHES[number if key is None else key]
        self.write(f"t{number}.toml", f'id = "{id or f"t{number}"}"\nkey_hashes = ["{key_hash}"]\n{extra}\n')

    def refusal(self) -> str:
        """The message of the error that a start must raise."""
        with pytest.raises(TenantFileError) as caught:
            TenantFolder(self.path, BUILT_IN).load()
        return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An empty folder."""
    return Folder(tmp_path)


def messages(state: FolderState) -> list[str]:
    """The problems of a state, without their folder."""
    return [str(each).rpartition("/")[2] for each in state.problems]


LINES = '''\
id = "a"  # limits.max_n

"quoted key" = 1
list = [
    "id",
    { name = "x" },
]
table = { inner = 3 }
text = """
deep = 1
"""
dotted.name = 2

[limits]
# max_n = 1
max_n = 2

[limits.deep]
deep = 4

[[keys]]
hash = "1"

[[keys]]
hash = "2"
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("id",), 1),
        (("quoted key",), 3),
        (("list",), 4),
        (("list", 1, "name"), 4),
        (("table", "inner"), 8),
        (("text",), 9),
        (("dotted", "name"), 12),
        (("limits",), 14),
        (("limits", "max_n"), 16),
        (("limits", "deep", "deep"), 19),
        (("keys", 0), 21),
        (("keys", 1), 24),
        (("keys", 1, "hash"), 25),
        (("limits", "max_tokens"), None),
        (("name",), None),
    ],
)
def test_the_line_of_a_value(path: tuple[str | int, ...], line: int | None) -> None:
    """A value is found where it begins: not in a comment, in a text, or under the same name elsewhere."""
    assert line_of(LINES, path) == line


HEAD = f'id = "a"\nkey_hashes = ["{HASHES[0]}"]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            HEAD + "\n[speculation]\nmax_draf = 0",
            "a.toml:5: unknown key 'speculation.max_draf'. Did you mean",
        ),
        (HEAD + "cache = { protect = { sink = 1 } }", "a.toml:3: unknown key 'cache.protect.sink'. Did you"),
        (HEAD + "[[keys]]\nhsh = 'x'", "a.toml:4: unknown key 'keys[0].hsh'. Did you mean 'hash'?"),
        (HEAD + "[[keys]]\nlabel = 'x'", "a.toml:3: missing key 'keys[0].hash'"),
        (HEAD + "colour = 1", "a.toml:3: unknown key 'colour'. Known are: models, weight, policy,"),
        (
            HEAD + "[classes]\ndefault = 'standart'",
            "a.toml:4: there is no SLA class 'standart'. Did you mean 'standard'?",
        ),
        (
            HEAD + "[classes]\nallowed = ['standard', 'gold']",
            "a.toml:4: there is no SLA class 'gold'. Known are: batch, interactive, standard.",
        ),
        (
            HEAD + "[classes]\nreserved = 'bath'",
            "a.toml:4: there is no SLA class 'bath'. Did you mean 'batch'?",
        ),
        (HEAD + "policy = 'adaptve'", "a.toml:3: there is no policy 'adaptve'. Did you mean 'adaptive'?"),
        (HEAD + "policy = 'x'", "Known are: adaptive, baseline, fixed, schedule."),
        (
            HEAD + "[cache]\nformat = 'k3v3'",
            'expected one of k16v16, k8v8, k8v4, mixed, k4v4, but it is "k3v3"',
        ),
        (
            HEAD + "[cache]\nformat = 'k8v8'\nprotect.important = 9",
            "a.toml:5: 'cache.protect.important' = 9 is not served: bits were not found to do more for tokens"
            " that are attended to most than for the latest; leave the key out, and see"
            " 'cache.protect.recent' and the format 'mixed'",
        ),
        (
            HEAD + "[speculation]\nmax_draft = 65",
            "a.toml:4: 'speculation.max_draft': expected `int` <= 64, but it is 65",
        ),
        (
            HEAD + "[speculation]\nproposers = ['x']",
            "'speculation.proposers[0]': expected one of ngram, suffix, prediction, draft, but it is \"x\"",
        ),
        (
            HEAD + "[cache]\nprotect.sinks = -1",
            "a.toml:4: 'cache.protect.sinks': expected `int` >= 0, but it is -1",
        ),
        (
            HEAD + "[cache]\nmax_context = '4k'",
            "'cache.max_context': expected `int | null`, but it is \"4k\"",
        ),
        (HEAD + "[classes]\nallowed = ['batch']", "a.toml:3: 'classes.default' is 'standard', which is not"),
        (HEAD + "weight = 0", "a.toml:3: 'weight': expected `float` > 0.0, but it is 0"),
        (
            HEAD + f"[[keys]]\nhash = '{HASHES[1]}'\nexpires = 2027-01-01T00:00:00",
            "a.toml:5: 'keys[0].expires'",
        ),
        (HEAD + f"[[keys]]\nhash = '{HASHES[0]}'", "a.toml:2: a key hash is there twice"),
        (HEAD + "models = [", "a.toml:3: not TOML: "),
        ("id = 'a'\nid = 'b'", "a.toml:2: not TOML: Cannot overwrite a value"),
        ("id = 'a'", "no key: it needs 'key_hashes'"),
    ],
)
def test_a_fault_has_its_line(folder: Folder, text: str, said: str) -> None:
    """A refusal has file, line and key, and the nearest known key or the known ones."""
    folder.write("a.toml", text)
    assert said in folder.refusal()


@pytest.mark.parametrize(
    "text", ["key_hashes = ['sf-secret']", "key_hashes = 'sf-secret'", "[[keys]]\nhash = 'sf-secret'"]
)
def test_no_message_has_a_key(folder: Folder, text: str) -> None:
    """A key that stands in a file where its hash should is refused, and not repeated."""
    folder.write("a.toml", f"id = 'a'\n{text}")
    assert "a.toml:" in folder.refusal()
    assert "secret" not in folder.refusal()


def test_what_cannot_be_read_is_refused(folder: Folder) -> None:
    """A link to nowhere, a folder and bytes that are no text are problems of that file alone."""
    folder.tenant(0)
    (folder.path / "gone.toml").symlink_to(folder.path / "nowhere")
    (folder.path / "folder.toml").mkdir()
    (folder.path / "bytes.toml").write_bytes(b"\xff")
    state = folder.reader.reload()
    assert list(state.loaded) == ["t0"]
    assert messages(state) == [
        "bytes.toml: not UTF-8",
        "folder.toml: Is a directory",
        "gone.toml: No such file or directory",
    ]


def test_defaults_hold_for_all(folder: Folder) -> None:
    """`defaults.toml` is no tenant; its tables are merged key by key, and a tenant's own value wins."""
    folder.write("defaults.toml", 'weight = 2.0\nmodels = ["m"]\n[limits]\nmax_n = 4\nmax_tokens = 100')
    folder.tenant(0, "[limits]\nmax_n = 1")
    folder.tenant(1, 'weight = 3.0\nmodels = ["x", "y"]')
    state = folder.reader.load()
    first, second = (state.loaded[name].tenant for name in ("t0", "t1"))
    assert (first.weight, first.models, first.limits.max_n, first.limits.max_tokens) == (2.0, ("m",), 1, 100)
    assert (second.weight, second.models, second.limits.max_n) == (3.0, ("x", "y"), 4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('id = "x"', "defaults.toml:1: 'id' belongs in a tenant's own file"),
        ("[limits]\nmax_m = 1", "defaults.toml:2: unknown key 'limits.max_m'. Did you mean 'max_n'?"),
        (
            "[cache.protect]\nimportant = 1",
            "defaults.toml:2: 'cache.protect.important' = 1 is not served: bits were not found",
        ),
    ],
)
def test_bad_defaults_are_refused(folder: Folder, text: str, said: str) -> None:
    """Defaults are checked like a tenant's file; they have no id and no keys."""
    folder.tenant(0)
    folder.write("defaults.toml", text)
    assert said in folder.refusal()


def test_every_problem_is_told(folder: Folder) -> None:
    """A start that fails names all files at fault, not the first alone."""
    folder.write("a.toml", "x = 1")
    folder.tenant(0)
    folder.write("b.toml", "y = 1")
    with pytest.raises(TenantFileError) as caught:
        folder.reader.load()
    assert [each.file.rpartition("/")[2] for each in caught.value.problems] == ["a.toml", "b.toml"]


def test_origins(folder: Folder) -> None:
    """Each value that holds has its origin: the tenant's file or the defaults, with the line, or neither."""
    folder.write("defaults.toml", "[limits]\nmax_n = 4\nmax_tokens = 5")
    folder.tenant(0, "[limits]\nmax_n = 1")
    state = folder.reader.load()
    loaded = state.loaded["t0"]
    values = {each.key: each for each in effective_values(loaded.tenant, loaded.file, state.defaults)}
    assert (values["limits.max_n"].value, values["limits.max_n"].origin) == (1, "t0.toml:4")
    assert (values["limits.max_tokens"].value, values["limits.max_tokens"].origin) == (5, "defaults.toml:3")
    assert values["weight"].origin == "built-in"
    assert "sha256" not in str(values)


def test_only_what_changed_is_read(folder: Folder) -> None:
    """A look that finds nothing new reads nothing; one that does reads the changed files and no other."""
    for number in range(5):
        folder.tenant(number)
    first = folder.reader.load()
    assert folder.reader.num_read == 5
    assert folder.reader.reload() is first
    assert folder.reader.num_read == 5
    folder.tenant(3, "weight = 9.0")
    second = folder.reader.reload()
    assert folder.reader.num_read == 6
    assert second.loaded["t3"].tenant.weight == 9.0
    assert all(second.loaded[f"t{i}"] is first.loaded[f"t{i}"] for i in (0, 1, 2, 4))
    folder.write("defaults.toml", "weight = 2.0")
    third = folder.reader.reload()
    assert folder.reader.num_read == 7
    assert [each.weight for each in third.tenants] == [2.0, 2.0, 2.0, 9.0, 2.0]
    (folder.path / "defaults.toml").unlink()
    assert [each.weight for each in folder.reader.reload().tenants] == [1.0, 1.0, 1.0, 9.0, 1.0]
    assert folder.reader.num_read == 7


def test_a_young_file_is_read_again(folder: Folder) -> None:
    """A file of this very moment may change within its time stamp's tick, so it is not taken as settled."""
    (folder.path / "a.toml").write_text(HEAD)
    folder.reader.load()
    os.utime(folder.path / "a.toml")
    folder.reader.reload()
    os.utime(folder.path / "a.toml", (10**9, 10**9))
    folder.reader.reload()
    num_read = folder.reader.num_read
    folder.reader.reload()
    assert folder.reader.num_read == num_read


def test_a_bad_file_keeps_the_last_good_one(folder: Folder) -> None:
    """While running, a bad file leaves its tenant as it was, a new one is left out, a mended one counts."""
    folder.tenant(0, "weight = 2.0")
    folder.tenant(1)
    folder.reader.load()
    folder.tenant(0, "wight = 3.0")
    folder.write("new.toml", "id = 3")
    state = folder.reader.reload()
    assert {name: each.tenant.weight for name, each in state.loaded.items()} == {"t0": 2.0, "t1": 1.0}
    assert messages(state) == [
        "t0.toml:3: unknown key 'wight'. Did you mean 'weight'?",
        "new.toml:1: 'id': expected `str`, but it is 3",
    ]
    folder.tenant(0, "weight = 3.0")
    (folder.path / "new.toml").unlink()
    state = folder.reader.reload()
    assert (state.loaded["t0"].tenant.weight, state.problems) == (3.0, ())
    (folder.path / "t1.toml").unlink()
    assert list(folder.reader.reload().loaded) == ["t0"]


def test_bad_defaults_leave_everything_as_it_was(folder: Folder) -> None:
    """Tenants keep the defaults that were good last, those that change meanwhile too."""
    folder.write("defaults.toml", "weight = 2.0")
    folder.tenant(0)
    before = folder.reader.load()
    folder.write("defaults.toml", "weight = -2.0")
    state = folder.reader.reload()
    assert state.loaded["t0"].tenant == before.loaded["t0"].tenant
    assert messages(state)[0].startswith("defaults.toml:1: 'weight'")
    folder.tenant(1)
    assert [each.weight for each in folder.reader.reload().tenants] == [2.0, 2.0]
    folder.write("defaults.toml", "weight = 4.0")
    state = folder.reader.reload()
    assert ([each.weight for each in state.tenants], state.problems) == ([4.0, 4.0], ())


def test_a_folder_that_is_gone_keeps_its_tenants(folder: Folder) -> None:
    """A folder that cannot be read changes nothing but the problems, and is taken up again."""
    folder.tenant(0)
    folder.reader.load()
    moved = folder.path.with_name("moved")
    folder.path.rename(moved)
    state = folder.reader.reload()
    assert (list(state.loaded), len(state.problems)) == (["t0"], 1)
    moved.rename(folder.path)
    state = folder.reader.reload()
    assert (list(state.loaded), state.problems) == (["t0"], ())


def test_the_first_owner_keeps_an_id_and_a_key(folder: Folder) -> None:
    """A file that comes to want another's key or id is refused until the other gives it up."""
    folder.tenant(0)
    folder.tenant(1)
    folder.reader.load()
    folder.tenant(0, key=1)
    folder.tenant(2, id="t1")
    state = folder.reader.reload()
    assert {name: each.tenant.key_hashes for name, each in state.loaded.items()} == {
        "t0": (HASHES[0],),
        "t1": (HASHES[1],),
    }
    first, second = (each.message for each in state.problems)
    assert first.startswith("the key hash 'sha256:")
    assert second.startswith("the id 't1' is also in ")
    assert HASHES[1] not in str(state.problems)
    (folder.path / "t1.toml").unlink()
    state = folder.reader.reload()
    assert {name: each.tenant.key_hashes for name, each in state.loaded.items()} == {
        "t0": (HASHES[1],),
        "t1": (HASHES[2],),
    }
    assert state.problems == ()


def test_keys_can_change_places(folder: Folder) -> None:
    """Two files that swap their keys at once are both taken; if one of them is bad, neither is."""
    folder.tenant(0)
    folder.tenant(1)
    folder.reader.load()
    folder.tenant(0, key=1)
    folder.tenant(1, "weight = -1.0", key=0)
    state = folder.reader.reload()
    assert [each.key_hashes[0] for each in state.tenants] == HASHES[:2]
    assert len(state.problems) == 2
    folder.tenant(1, key=0)
    state = folder.reader.reload()
    assert ([each.key_hashes[0] for each in state.tenants], state.problems) == ([HASHES[1], HASHES[0]], ())


def test_hidden_files_do_not_count(folder: Folder) -> None:
    """What an editor or a sync tool leaves under a name with a dot in front is no tenant."""
    folder.tenant(0)
    folder.write(".t1.toml", "x = 1")
    folder.write("t2.toml~", "x = 1")
    assert list(folder.reader.load().loaded) == ["t0"]


def test_expired_keys(folder: Folder) -> None:
    """Several keys open a tenant, each until its end; after it the answer says that it expired, and when."""
    folder.write(
        "a.toml",
        f'id = "a"\nkey_hashes = ["{HASHES[0]}"]\n'
        f'[[keys]]\nlabel = "old"\nhash = "{HASHES[1]}"\nexpires = 2027-01-31T00:00:00Z\n'
        f'[[keys]]\nhash = "{HASHES[2]}"\nexpires = 2027-01-31T00:00:00-08:00\n',
    )
    now = 1801353600.0 - 1  # A second before the first end.
    tenants = Tenants(folder.reader.load().tenants, now=lambda: now)

    def opened() -> list[Any]:
        return [_opens(lambda i=i: tenants.authenticate(f"Bearer key {i}").id) for i in range(4)]

    assert opened() == ["a", "a", "a", "Incorrect API key."]
    now += 1
    assert opened() == ["a", "This API key expired on 2027-01-31 00:00:00 UTC.", "a", "Incorrect API key."]


def test_many_tenants_do_not_slow_authentication() -> None:
    """Finding a key among thousands takes the same steps as finding it alone."""
    tenants = [Tenant(id=f"t{i}", key_hashes=(hash_key(f"key {i}"),)) for i in range(5000)]
    counts = {
        count_calls(partial(Tenants(tenants[:number]).authenticate, f"Bearer key {number - 1}"))
        for number in (1, 100, 5000)
    }
    assert len(counts) == 1


def test_the_benchmark_has_every_bar() -> None:
    """It measures loading, looking, authenticating and deciding, and that a look reads what changed only."""
    measured = {what: figure for what, figure, _ in measure(3)}
    assert measured["  files read by it"] == 1
    assert {"load 3 files", "look, nothing changed", "decide a plan (adaptive)"} < measured.keys()
    assert {f"authenticate, {count} tenants" for count in (1, 3, 100)} < measured.keys()


def _opens(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except Exception as error:
        return str(error)


def test_without_files_left_nobody_gets_in(folder: Folder) -> None:
    """Taking all files away closes the server, and does not open it to everybody."""
    folder.tenant(0)
    tenants = Tenants(folder.reader.load().tenants, keys_required=True)
    (folder.path / "t0.toml").unlink()
    tenants.replace(folder.reader.reload().tenants)
    assert tenants.keys_required
    assert _opens(lambda: tenants.authenticate("Bearer key 0").id) == "Incorrect API key."
    assert _opens(lambda: tenants.authenticate(None).id).startswith("No API key")
