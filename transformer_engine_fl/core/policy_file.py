"""The policy file's model, apart from policy.py so that pydantic is imported only for it."""

from __future__ import annotations

import tomllib
from typing import Any

from pydantic import BaseModel, ConfigDict, StrictBool, StrictStr, ValidationError

from transformer_engine_fl.core.errors import ConfigurationError, suggestion

__all__ = ["fields_of"]


class PolicyFile(BaseModel):
    """The keys a policy file may have: those of ``SelectionPolicy``."""

    model_config = ConfigDict(extra="forbid")

    prefer: StrictStr | None = None
    strict: StrictBool | None = None
    per_op_order: dict[str, list[StrictStr]] | None = None
    allow_vendors: list[StrictStr] | None = None
    deny_vendors: list[StrictStr] | None = None
    require: list[StrictStr] | None = None


def fields_of(text: str, path: str) -> dict[str, Any]:
    """The fields that a policy file gives, as keywords for ``SelectionPolicy``.

    Raises:
        ConfigurationError: names the file, the key and what it should be.
    """
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # beyond TOMLDecodeError: huge or deep values
        raise ConfigurationError(f"TE_FL_POLICY_FILE: {path} is not valid TOML: {error}") from None
    try:
        return PolicyFile.model_validate(content).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = tuple(PolicyFile.model_fields)
        if first["type"] == "extra_forbidden":
            problem = f"unknown key {key!r}; valid: {', '.join(known)}{suggestion(key, known)}"
        else:
            problem = f"key {key!r}: {first['msg'].lower()}, got {first['input']!r}"
        raise ConfigurationError(f"TE_FL_POLICY_FILE: {path}: {problem}") from None
