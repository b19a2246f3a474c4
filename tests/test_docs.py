"""The documentation is complete where it claims to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import fields

from surefoot.gateway.errors import RULES
from surefoot.gateway.schemas import ChatRequest, CompletionRequest

API = (Path(__file__).parent.parent / "docs" / "api.md").read_text()


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_every_request_field_is_documented(request_type: type[ChatRequest] | type[CompletionRequest]) -> None:
    """docs/api.md names every field that a request may have."""
    missing = [field.name for field in fields(request_type) if f"`{field.name}`" not in API]
    assert missing == []


def test_every_error_code_is_documented() -> None:
    """docs/api.md names every code, beside its status."""
    rows = [line for line in API.splitlines() if line.startswith("| ") and line[2:5].isdigit()]
    for rule in RULES.values():
        assert any(row.startswith(f"| {rule.status} ") and f"`{rule.code}`" in row for row in rows), rule.code
