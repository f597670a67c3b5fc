"""Write docs/api.md from the API's own OpenAPI schema: `make docs`. tests/test_api.py fails when the two differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from cooc.api import DESCRIPTION
from cooc.api.routes import ROUTERS

PAGE = Path(__file__).with_name("api.md")
HEAD = f"""# REST API

Written by `make docs` from the OpenAPI schema (`/api/v1/openapi.json`; `/docs` in a browser); do not edit.

{DESCRIPTION}
"""


def schema() -> dict[str, Any]:
    app = FastAPI(title="cooc")
    for router in ROUTERS:
        app.include_router(router)
    found = app.openapi()
    for methods in found["paths"].values():  # choices are shown where they are made
        for parameter in (one for route in methods.values() for one in route.get("parameters", [])):
            parameter["schema"] |= resolve(found, parameter["schema"])
    return found


def page() -> str:
    found = schema()
    return HEAD + "".join(routes(found)) + "\n## Answers\n" + "".join(shapes(found))


def routes(found: dict[str, Any]) -> Iterator[str]:
    for path, methods in found["paths"].items():
        for method, route in methods.items():
            yield f"\n## `{method.upper()} {path}`\n\n{route['description']}\n"
            rows = [
                (one["name"], one["in"] + ("" if one.get("required") else ", optional"), one["schema"])
                for one in route.get("parameters", [])
            ]
            for kind, body in route.get("requestBody", {}).get("content", {}).items():
                form = resolve(found, body["schema"])
                rows += [
                    (name, kind + ("" if name in form.get("required", []) else ", optional"), value)
                    for name, value in form["properties"].items()
                ]
            if rows:
                yield "\n| parameter | where | type | |\n|---|---|---|---|\n"
                yield from (f"| `{n}` | {w} | {kind_of(s)} | {s.get('description', '')} |\n" for n, w, s in rows)
            yield "\nAnswers: " + "; ".join(answers(route)) + "\n"


def answers(route: dict[str, Any]) -> Iterator[str]:
    for code, answer in sorted(route["responses"].items()):
        shape = answer.get("content", {}).get("application/json", {}).get("schema", {}).get("$ref", "")
        kinds = [kind for kind in answer.get("content", {}) if kind != "application/json"]
        if code < "400":
            yield f"{code} " + (
                f"[{last(shape)}](#{last(shape).lower()})" if shape else ", ".join(kinds) or "no content"
            )
    yield "problems " + ", ".join(code for code in sorted(route["responses"]) if code >= "400")


def shapes(found: dict[str, Any]) -> Iterator[str]:
    for name, shape in sorted(found["components"]["schemas"].items()):
        if name.startswith(("Body_", "HTTPValidation", "ValidationError")) or "properties" not in shape:
            continue
        yield f"\n### {name}\n\n| field | type | |\n|---|---|---|\n"
        for field, value in shape["properties"].items():
            yield f"| `{field}` | {kind_of(value)} | {value.get('description', '')} |\n"


def kind_of(value: dict[str, Any]) -> str:
    """A type in a few words: integer, 1 to 200, default 20."""
    if "enum" in value:
        text = " / ".join(f"`{one}`" for one in value["enum"])
    elif "$ref" in value:
        return f"[{last(value['$ref'])}](#{last(value['$ref']).lower()})"
    elif "anyOf" in value:
        text = " or ".join(kind_of(one) for one in value["anyOf"])
    elif "const" in value:
        text = f"`{value['const']}`"
    elif "prefixItems" in value:
        text = ", ".join(kind_of(one) for one in value["prefixItems"])
    elif value.get("type") == "array":
        text = f"list of {kind_of(value['items'])}"
    else:
        binary = value.get("format") == "binary" or "contentMediaType" in value
        text = "file" if binary else str(value.get("type", "any"))
    low, high = value.get("minimum"), value.get("maximum")
    text += f", {low} to {high}" if low is not None and high is not None else ""
    default = value.get("default")
    return text + (f", default `{default}`" if default not in (None, "", []) else "")


def resolve(found: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = found["components"]["schemas"][last(value["$ref"])] if "$ref" in value else value
    return shape


def last(reference: str) -> str:
    return reference.rpartition("/")[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
