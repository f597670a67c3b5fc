"""Requests that schemathesis makes up from the schema of a server, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error


def break_nothing(client: httpx.Client, examples: int, change: Callable[[Any], None] = lambda case: None) -> int:
    """So many requests to each operation, each changed as told: no answer is a 5xx. How many operations there are."""
    address = str(client.base_url).removesuffix("/").removesuffix("/api/v1")
    schema = schemathesis.openapi.from_dict(client.get(f"{address}/api/v1/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    for operation in operations:

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            change(case)
            case.call_and_validate(base_url=address, checks=[not_a_server_error])

        check()
    return len(operations)
